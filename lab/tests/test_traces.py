"""Recorded lengths: what is read, and how each bad line is named."""

import json

import pytest
from seer_lab.lengths import GroupLengths, RecordedTurn
from seer_lab.traces import read_lengths
from seer_lab.workload_choice import choose_workload

from seer_core.errors import ConfigError, PromptError

LINE = {"group": 7, "prompt_tokens": 3, "output_tokens": [5, 9]}


@pytest.fixture
def write(tmp_path):
    """Return a function that writes lines, mappings as JSON and texts as they are."""

    def write(*lines):
        path = tmp_path / "lengths.jsonl"
        path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
        return path

    return write


def test_lines_become_groups_and_the_longest_response_is_the_limit(write):
    path = write(LINE, "", {**LINE, "group": "b", "output_tokens": [2], "reward": 0.5})
    assert read_lengths(path) == [[GroupLengths("7", 3, (5, 9), 9), GroupLengths("b", 3, (2,), 9)]]


def test_groups_may_differ_in_size_and_limit(write):
    path = write({**LINE, "max_tokens": 50}, {**LINE, "group": 8, "output_tokens": [1, 2, 3]})
    (groups,) = read_lengths(path)
    assert [(len(group.output_tokens), group.max_tokens) for group in groups] == [(2, 50), (3, 9)]


def test_iterations_are_kept_apart_and_may_use_the_same_groups(write):
    path = write({**LINE, "iteration": 2}, {**LINE, "iteration": 1, "output_tokens": [4]}, LINE)
    assert [groups[0].output_tokens for groups in read_lengths(path)] == [(5, 9), (4,), (5, 9)]


def test_where_selects_lines_by_text_and_by_number(write):
    lines = [{**LINE, "workload": name, "iteration": k} for name in ("a", "b") for k in (0, 1)]
    path = write(*lines)
    assert len(read_lengths(path, ["workload=b"])) == 2
    assert len(read_lengths(path, ["workload=b", "iteration=1"])) == 1


def test_several_workloads_are_an_error_that_says_how_to_choose(write):
    path = write({**LINE, "workload": "math"}, {**LINE, "workload": "code"})
    with pytest.raises(PromptError, match=r"code, math; choose one: --where workload=code"):
        read_lengths(path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"group": 1, "prompt_tokens": 3}, "object missing required field `output_tokens`"),
        ({"group": 1, "output_tokens": [3]}, "object missing required field `prompt_tokens`"),
        ({"prompt_tokens": 1, "output_tokens": [3]}, "object missing required field `group`"),
        ({**LINE, "output_tokens": []}, "output_tokens: expected `array` of length >= 1"),
        ({**LINE, "output_tokens": [4, -1]}, r"output_tokens\[1\]: expected `int` >= 1"),
        ({**LINE, "output_tokens": [4, 0]}, r"output_tokens\[1\]: expected `int` >= 1"),
        ({**LINE, "output_tokens": [4.5]}, r"output_tokens\[0\]: expected `int`, got `float`"),
        ({**LINE, "output_tokens": ["4"]}, r"output_tokens\[0\]: expected `int`, got `str`"),
        ({**LINE, "output_tokens": [None]}, r"output_tokens\[0\]: expected `int`, got `null`"),
        ({**LINE, "prompt_tokens": 0}, "prompt_tokens: expected `int` >= 1"),
        ({**LINE, "max_tokens": 8}, r"output_tokens\[1\] is 9, above max_tokens = 8"),
        ({**LINE, "group": None}, "group: expected"),
        ([1, 2], "expected `object`, got `array`"),
        ("{not json", "not valid JSON"),
    ],
    ids=str,
)
def test_a_bad_line_is_named_by_its_number(write, line, words):
    path = write({**LINE, "group": "good"}, line)
    with pytest.raises(PromptError, match=rf"lengths\.jsonl:2: {words}"):
        read_lengths(path)


def test_a_group_that_comes_twice_is_named_with_its_first_line(write):
    with pytest.raises(PromptError, match=r":3: group 7 of iteration 0 is in line 1 already"):
        read_lengths(write(LINE, {**LINE, "group": 8}, LINE))


def test_a_file_of_another_form_is_one_sentence_with_the_form_that_is_needed(write):
    with pytest.raises(PromptError) as caught:
        read_lengths(write(*["[1, 2, 3]"] * 25))
    first, second = str(caught.value).splitlines()
    assert first.endswith(":1: expected `object`, got `array`")
    assert 'such as {"group": "a", "prompt_tokens": 300' in second


def test_many_bad_lines_are_counted(write):
    with pytest.raises(PromptError, match=r":1: .*\n(.*\n)+\.\.\. and 15 more\nMend them"):
        read_lengths(write(*["{"] * 25, LINE))


@pytest.mark.parametrize(
    ("where", "words"), [((), "holds no line"), (["iteration=3"], "no line says iteration=3")]
)
def test_nothing_to_simulate_is_an_error(write, where, words):
    path = write(*([LINE] if where else ["", " "]))
    with pytest.raises(PromptError, match=words):
        read_lengths(path, where)


@pytest.mark.parametrize("where", ["iteration", "=3"])
def test_a_selection_must_be_key_and_value(write, where):
    with pytest.raises(PromptError, match=r"give KEY=VALUE"):
        read_lengths(write(LINE), [where])


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(PromptError, match=r"cannot read .*No such file"):
        read_lengths(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"group": "\xff", "prompt_tokens": 3, "output_tokens": [5]}', "byte 0xff at 11 is not UTF-8"),
        (b'{"group": ' + b"[" * 5000, "nested too deeply"),
        (b"\xef\xbb\xbf{}", "byte-order mark"),
    ],
    ids=range(3),
)
def test_a_line_that_no_reader_survives_is_named_too(tmp_path, raw, words):
    path = tmp_path / "lengths.jsonl"
    path.write_bytes(json.dumps(LINE).encode() + b"\n" + (raw if raw[0] == 123 else b"") + b"\n")
    if raw[0] != 123:
        path.write_bytes(raw)
    with pytest.raises(PromptError, match=words):
        read_lengths(path)
    if raw[0] == 123:
        with pytest.raises(PromptError, match=words):
            read_lengths(path, ["group=7"])


@pytest.mark.parametrize("text", ["not\0a file", "x" * 5000])
def test_what_is_no_name_of_a_file_is_no_workload(text):
    with pytest.raises(ConfigError, match="is neither a workload nor a file"):
        choose_workload(text)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"n": 10**12}, "request 'g/1' is unfinished"),
        ({"n": 0}, "output_tokens: expected `array` of length >= 1"),
        ({"prompt_tokens": -5}, "prompt_tokens: expected `int` >= 1"),
        ({"prompt_tokens": 10**12}, "prompt_tokens: expected `int` <= 10000000"),
    ],
    ids=str,
)
def test_a_trace_of_groups_that_cannot_be_is_refused(tmp_path, spec, words):
    group = {"id": "g", "prompt_tokens": 3, "n": 1, "max_tokens": 9} | spec
    finished = {
        "type": "ChunkFinished",
        "request_id": "g/0",
        "instance_id": "i",
        "tokens": 4,
        "stopped": True,
    }
    over = {"type": "Complete", "request_id": "g/0", "finish_reason": "stop"}
    records = [
        {"now": 0.0, "event": {"type": "GroupsSubmitted", "groups": [group]}, "commands": []},
        {"now": 1.0, "event": finished, "commands": [over]},
    ]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(PromptError, match=words):
        read_lengths(tmp_path)


def test_a_trace_in_which_a_group_s_name_comes_again_is_refused(tmp_path):
    group = {"id": "g", "prompt_tokens": 3, "n": 1, "max_tokens": 9}
    record = {"now": 0.0, "event": {"type": "GroupsSubmitted", "groups": [group]}, "commands": []}
    (tmp_path / "trace.jsonl").write_text(f"{json.dumps(record)}\n{json.dumps(record)}\n")
    with pytest.raises(PromptError, match="group 'g' was submitted twice"):
        read_lengths(tmp_path)


def test_a_trace_in_which_a_response_is_over_without_a_chunk_is_refused(tmp_path):
    group = {"id": "g", "prompt_tokens": 3, "n": 1, "max_tokens": 9}
    over = {"type": "Complete", "request_id": "g/0", "finish_reason": "stop"}
    record = {"now": 0.0, "event": {"type": "GroupsSubmitted", "groups": [group]}, "commands": [over]}
    (tmp_path / "trace.jsonl").write_text(json.dumps(record))
    with pytest.raises(PromptError, match=r"group 'g': output_tokens\[0\]: expected `int` >= 1"):
        read_lengths(tmp_path)


def submitted(**fields):
    group = {"id": "g", "prompt_tokens": 3, "n": 1, "max_tokens": 90} | fields
    return {"now": 0.0, "event": {"type": "GroupsSubmitted", "groups": [group]}, "commands": []}


def chunk(now, tokens, *commands, stopped=True):
    event = {"type": "ChunkFinished", "request_id": "g/0", "instance_id": "i", "tokens": tokens}
    return {"now": now, "event": event | {"stopped": stopped}, "commands": list(commands)}


def answered(now, tokens, *commands, done=False):
    event = {"type": "EnvironmentAnswered", "request_id": "g/0", "tokens": tokens, "done": done}
    return {"now": now, "event": event, "commands": list(commands)}


ASKED = {"type": "AskEnvironment", "request_id": "g/0"}
STOPPED = {"type": "Complete", "request_id": "g/0", "finish_reason": "stop"}
CUT = {"type": "Complete", "request_id": "g/0", "finish_reason": "length"}


def trace(folder, *records):
    (folder / "trace.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_a_resumed_response_is_as_long_as_both_processes_made_it(tmp_path):
    run = trace(tmp_path, submitted(resumed=[{"tokens": 7}]), chunk(1.0, 4, STOPPED))
    [[group]] = read_lengths(run)
    assert group.output_tokens == (11,)


def test_turns_of_a_run_have_the_times_and_the_tokens_of_their_answers(tmp_path):
    run = trace(
        tmp_path,
        submitted(turns=True),
        chunk(1.0, 5, stopped=False),
        chunk(2.0, 4, ASKED),
        answered(2.5, 8),
        chunk(3.0, 6, ASKED),
        answered(5.0, 0, STOPPED, done=True),
    )
    [[group]] = read_lengths(run)
    assert group.turns == ((RecordedTurn(9, 0.5, 8), RecordedTurn(6, 2.0, 0)),)
    assert group.output_tokens == (23,)


def test_a_response_that_its_limit_ends_behind_an_answer_has_one_more_turn(tmp_path):
    run = trace(
        tmp_path,
        submitted(turns=True),
        chunk(2.0, 4, ASKED),
        answered(2.5, 8),
        chunk(3.0, 78, CUT, stopped=False),
    )
    [[group]] = read_lengths(run)
    assert group.turns == ((RecordedTurn(4, 0.5, 8), RecordedTurn(78, None, 0)),)


def test_a_resumed_run_whose_turns_were_answered_is_refused(tmp_path):
    run = trace(
        tmp_path,
        submitted(turns=True, resumed=[{"tokens": 7}]),
        chunk(2.0, 4, ASKED),
        answered(2.5, 8, STOPPED, done=True),
    )
    with pytest.raises(PromptError, match="request 'g/0' was begun by an earlier process"):
        read_lengths(run)
