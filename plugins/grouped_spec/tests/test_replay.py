import json

import numpy as np
import pytest
from click.testing import CliRunner
from seer_grouped_spec.cli import replay_command
from seer_grouped_spec.replay import Recording, ReplayError, load, replay, replay_steps

RNG = np.random.default_rng(0)


def recordings(groups=3, responses=4, tokens=60):
    made = []
    for group in range(groups):
        base = RNG.permutation(1_000).astype(np.int32)[:tokens] + 1_000 * group
        made.append(Recording(f"g{group}", base[:3], tuple(base[3:].copy() for _ in range(responses))))
    return made


def rates(rows):
    return {row.siblings: row.acceptance_length for row in rows}


def test_a_text_that_a_sibling_wrote_is_accepted_whole():
    rows = replay(recordings(), (0, 1, 3), draft_tokens=8)
    assert rates(rows) == {0: 1.0, 1: pytest.approx(57 / 7), 3: pytest.approx(57 / 7)}
    assert rows[0].drafted_per_step == 0.0
    assert [(row.groups, row.responses, row.tokens) for row in rows] == [(3, 12, 12 * 57)] * 3


def test_paths_and_trees_of_the_same_text_accept_as_much():
    made = recordings()
    assert rates(replay(made, (2,), 8)) == rates(replay(made, (2,), 1, tree_nodes=8))


def with_answers(made, *places):
    answers = np.array(places, np.int32)
    return Recording(made.group, made.prompt, made.responses, (answers,) * len(made.responses))


def test_an_answer_of_an_environment_takes_no_step_and_no_draft_crosses_it():
    made = [with_answers(each, (20, 40)) for each in recordings()]
    for options in ({"draft_tokens": 8}, {"draft_tokens": 1, "tree_nodes": 8}):
        (row,) = replay(made, (1,), **options)
        assert (row.tokens, row.steps) == (12 * 37, 12 * (3 + 2))  # 20 and 17 tokens, 9 at most in a step


@pytest.mark.parametrize("places", [[(0, 30)], [(380, 400)], [(0, 1), (2, 300), (301, 399)]])
def test_an_answer_may_be_anywhere(places):
    (made,) = walks()
    (row,) = replay([with_answers(made, *places)], ("live",))
    assert row.tokens == 6 * (400 - sum(end - start for start, end in places))
    assert 0 < row.steps <= row.tokens


def test_what_an_answer_says_is_drafted_when_the_model_repeats_it():
    text = RNG.permutation(1_000).astype(np.int32)[:200]
    said = Recording("g", text[:0], (np.concatenate([text, text]),))
    (row,) = replay([with_answers(said, (3, 200))], (0,), draft_tokens=8)
    assert (row.tokens, row.steps) == (203, 3 + 1 + 23)  # nothing foretells the first token behind the answer


@pytest.mark.parametrize("places", [[], [(50, 90), (91, 300)]])
def test_the_steps_of_a_replay_are_those_of_its_row(places):
    (made,) = walks()
    if places:
        made = with_answers(made, *places)
    steps = replay_steps(made)
    (row,) = replay([made], ("live",))
    assert sum(len(each.starts) for each in steps) == row.steps
    for number, each in enumerate(steps):
        ends = each.starts + each.accepted + 1
        assert [0, *ends[:-1]] == each.starts.tolist()
        assert ends[-1] == made.written(number) == 400 - sum(end - start for start, end in places)
        drafted = (each.chances > 0).sum(axis=1)
        assert (each.accepted <= drafted).all()
        assert (np.diff(each.chances, axis=1) <= 0).all()


def walks(responses=6, tokens=400, seed=1):
    """A group that walks through one graph: after each token one of two may come."""
    random = np.random.default_rng(seed)
    follows = random.integers(0, 60, (60, 2))
    texts = np.zeros((responses, tokens), np.int32)
    for at in range(1, tokens):
        texts[:, at] = follows[texts[:, at - 1], random.integers(0, 2, responses)]
    return [Recording("g", texts[0, :0], tuple(texts))]


@pytest.mark.parametrize("siblings", [0, 3, "live"])
def test_of_a_tree_more_is_accepted_the_more_paths_it_has_and_of_one_path_as_much_as_of_a_line(siblings):
    [line] = replay(walks(), (siblings,), 8)
    one, two, three, every = (
        replay(walks(), (siblings,), 8, tree_nodes=8, paths=paths)[0].acceptance_length
        for paths in (1, 2, 3, 0)
    )
    assert one == pytest.approx(line.acceptance_length, rel=0.02)
    assert 1.1 * one < two < three < every


def test_live_siblings_in_lock_step_foresee_only_what_is_behind_them():
    assert rates(replay(recordings(), ("live",))) == {"live": 1.0}
    staggered = [Recording("g", r.prompt, (r.responses[0], r.responses[0][5:])) for r in recordings()]
    (row,) = replay(staggered, ("live",))
    assert row.tokens - row.steps == 3 * 5  # the lead of each second response, once


def test_the_control_takes_other_prompts_responses():
    assert rates(replay(recordings(), (2,), control=True)) == {2: 1.0}


def test_text_of_other_groups_drafts_through_the_common_index():
    made = recordings(groups=1) + [Recording("h", r.prompt[:0], r.responses) for r in recordings(groups=1)]
    same = [made[0], Recording("copy", made[0].prompt, made[0].responses)]
    assert rates(replay(same, (0,)))[0] == 1.0
    assert rates(replay(same, (0,), common=1))[0] > 5


def test_a_filter_drafts_less():
    made = [Recording("g", np.zeros(0, np.int32), tuple(RNG.integers(0, 4, (4, 200)).astype(np.int32)))]
    whole, cut = (replay(made, (3,), 8, min_probability=floor)[0] for floor in (0.0, 0.5))
    assert cut.drafted_per_step < whole.drafted_per_step
    assert cut.accepted_share > whole.accepted_share


def test_more_siblings_than_there_are_is_an_error_and_smaller_groups_are_left_out():
    made = [*recordings(groups=1, responses=2), *recordings(groups=1, responses=4)]
    assert replay(made, (3,))[0].groups == 1
    with pytest.raises(ReplayError, match="siblings=4: no group has so many; there are 4 responses at most"):
        replay(made, (4,))
    with pytest.raises(ReplayError, match="there are 2 prompts at most, this one included, so ask for 1"):
        replay(made, (2,), control=True)


def test_npz_json_lines_and_completions_give_the_same_responses(tmp_path):
    texts = {("a", -1): [1, 2], ("a", 0): [3, 4, 5], ("a", 1): [3, 4], ("b", -1): [9], ("b", 0): [8]}
    arrays = {
        "tokens": np.array([t for text in texts.values() for t in text], np.uint16),
        "offsets": np.cumsum([0, *(len(text) for text in texts.values())]),
        "group": np.array([group for group, _ in texts]),
        "response": np.array([number for _, number in texts]),
    }
    np.savez(tmp_path / "r.npz", **arrays)
    lines = [
        {"group": "a", "prompt_token_ids": [1, 2], "responses": [[3, 4, 5], [3, 4]]},
        {"group": "b", "prompt_token_ids": [9], "responses": [[8]]},
    ]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, lines)))
    completions = [
        {"group_id": group, "index": number, "token_ids": text, "finish_reason": "stop"}
        for (group, number), text in reversed(texts.items())
        if number >= 0
    ]
    (tmp_path / "completions.jsonl").write_text("\n".join(map(json.dumps, completions)) + "\n\n")
    for name in ("r.npz", "r.jsonl", "completions.jsonl"):
        read = {r.group: [text.tolist() for text in r.responses] for r in load(tmp_path / name)}
        assert read == {"a": [[3, 4, 5], [3, 4]], "b": [[8]]}
        prompts = {r.group: r.prompt.tolist() for r in load(tmp_path / name)}
        assert prompts == ({"a": [], "b": []} if name == "completions.jsonl" else {"a": [1, 2], "b": [9]})


def test_a_run_s_completions_say_which_tokens_were_answers(tmp_path):
    def line(index, count, *turns):
        keys = ("tokens", "answer_tokens")
        turns = [dict(zip(keys, each, strict=True)) | {"reward": 1.0} for each in turns]
        return json.dumps({"group_id": "a", "index": index, "token_ids": [5] * count, "turns": turns})

    path = tmp_path / "completions.jsonl"
    path.write_text("\n".join([line(1, 3), line(0, 12, (2, 4), (0, 1), (3, 1), (1, 0))]))
    (made,) = load(path)
    assert [each.tolist() for each in made.answers] == [[[2, 7], [10, 11]], []]
    assert [made.written(number) for number in (0, 1)] == [6, 3]
    path.write_text(line(0, 12, (2, 4)))
    with pytest.raises(
        ReplayError, match="line 1: turns are of 6 tokens, and token_ids has 12; give a run's"
    ):
        load(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not a JSON object"),
        ("{}", "line 1 has neither group and responses nor group_id, index and token_ids"),
        ('{"group": "a", "responses": [["x"]]}', "line 1 is not a JSON object"),
        ('{"group": "a", "responses": [[1, -2]]}', "line 1, response 0: token 1 is -2"),
        ('{"group": "a", "responses": [[4294967296]]}', "response 0: token 0 is 4294967296"),
        ('{"group": "a", "responses": [[36893488147419103232]]}', "line 1"),
        ('{"group": "a", "responses": []}', "holds no response tokens"),
        ('{"group_id": "a", "index": 0, "token_ids": [1]}\n' * 2, "line 2: group a has response 0 twice"),
        ("", "holds no response tokens"),
    ],
)
def test_bad_lines_are_errors_that_name_the_place(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(line)
    with pytest.raises(ReplayError, match=message):
        load(path)


def test_bad_npz_files_are_errors(tmp_path):
    path = tmp_path / "bad.npz"
    path.write_bytes(b"not a zip")
    with pytest.raises(ReplayError, match=r"is not an \.npz of plain arrays"):
        load(path)
    good = {
        "tokens": np.arange(3),
        "offsets": np.array([0, 3]),
        "group": np.zeros(1),
        "response": np.zeros(1, int),
    }
    for change, message in (
        ({"offsets": np.array([0, 4])}, "offsets must rise within the 3 tokens"),
        ({"offsets": np.array([0])}, "do not fit"),
        ({"tokens": np.zeros(3)}, "arrays of integers"),
        ({"tokens": np.array([1, 2**40, 3])}, "token 1 is 1099511627776"),
    ):
        np.savez(path, **{**good, **change})
        with pytest.raises(ReplayError, match=message):
            load(path)
    np.savez(path, tokens=good["tokens"])
    with pytest.raises(ReplayError, match="has no array"):
        load(path)
    with pytest.raises(ReplayError, match="cannot be read"):
        load(tmp_path / "missing.npz")


def write_run(path):
    lines = [
        {"group_id": r.group, "index": n, "token_ids": text.tolist()}
        for r in recordings()
        for n, text in enumerate(r.responses)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))


def test_the_command_prints_a_table_and_writes_rows(tmp_path):
    write_run(tmp_path / "completions.jsonl")
    result = CliRunner().invoke(
        replay_command, [str(tmp_path / "completions.jsonl"), "--json", str(tmp_path / "rows.json")]
    )
    assert result.exit_code == 0, result.output
    assert "accepted / drafted" in result.stdout
    assert "siblings 3: 3 groups" in result.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["siblings"] for row in rows] == [0, 1, 3, "live"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--siblings", "1,many"], "'many' is neither a number nor live"),
        (["--siblings", "7"], "no group has so many"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(tmp_path, arguments, message):
    write_run(tmp_path / "completions.jsonl")
    result = CliRunner().invoke(replay_command, [str(tmp_path / "completions.jsonl"), *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def npz(path, **changes):
    arrays = {
        "tokens": np.arange(3),
        "offsets": np.array([0, 3]),
        "group": np.array(["a"]),
        "response": np.array([0]),
    }
    np.savez(path, **(arrays | changes))
    return path.read_bytes()


@pytest.mark.parametrize("name", ["tokens", "offsets", "group", "response"])
@pytest.mark.parametrize("array", [np.array(3), np.zeros((1, 1), int), np.array([{"a": 1}], object)])
def test_arrays_of_other_dimensions_or_of_objects_are_errors(tmp_path, name, array):
    npz(tmp_path / "r.npz", **{name: array})
    with pytest.raises(ReplayError, match=r"dimension|holds Python objects") as caught:
        load(tmp_path / "r.npz")
    assert "allow_pickle" not in str(caught.value)


def test_an_npz_that_was_cut_or_changed_anywhere_is_an_error_or_readable(tmp_path):
    path = tmp_path / "r.npz"
    whole = npz(path)
    refusals = []
    for at in range(0, len(whole), 5):
        for data in (whole[:at], whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :]):
            path.write_bytes(data)
            try:
                load(path)
            except ReplayError as error:
                refusals.append(str(error))
    assert len(refusals) > len(whole) / 5
    assert [text for text in refusals if "r.npz" not in text or not text.isprintable()] == []


def test_a_git_lfs_pointer_is_called_one(tmp_path):
    path = tmp_path / "r.npz"
    path.write_bytes(b"version https://git-lfs/spec/v1\noid sha256:00\nsize 3\n")
    with pytest.raises(
        ReplayError, match="git-lfs pointer and not the file itself, fetch that with `git lfs"
    ):
        load(path)


def test_lines_that_are_not_utf_8_or_too_deep_are_errors(tmp_path):
    path = tmp_path / "r.jsonl"
    for raw, fact in (
        (b'{"group": "\xff", "responses": [[1]]}', "not UTF-8"),
        (b"[" * 100_000, "JSON object"),
    ):
        path.write_bytes(raw)
        with pytest.raises(ReplayError, match=f"line 1 is not a JSON object.*{fact}|line 1 is not a {fact}"):
            load(path)


@pytest.mark.parametrize("share", [float("nan"), -0.1, 1.1])
def test_a_least_probability_is_a_share(share):
    with pytest.raises(ReplayError, match="pass one from 0 to 1"):
        replay(recordings(), (0,), min_probability=share)
