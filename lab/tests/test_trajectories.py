"""Recorded trajectories: what is read, how each bad line is named, and how they are rolled out again."""

import json

import pytest
from seer_lab.lengths import RecordedTurn
from seer_lab.policies import POLICIES
from seer_lab.simulate import simulate
from seer_lab.traces import read_lengths
from seer_lab.workload_choice import choose_workload

from seer_core.errors import ConfigError, PromptError
from seer_core.model.events import AskEnvironment, EnvironmentAnswered

LINE = {"group": 7, "index": 0, "prompt_tokens": 30, "turns": [[40, 0.5, 100], [13, None, 0]]}


def with_turns(*turns, **fields):
    return {**LINE, "turns": turns, **fields}


@pytest.fixture
def write(tmp_path):
    """Return a function that writes lines, mappings as JSON and texts as they are."""

    def write(*lines):
        path = tmp_path / "turns.jsonl"
        path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
        return path

    return write


@pytest.fixture
def agents(write):
    """Return a function: 24 trajectories of one to four turns as a workload, changed by options."""

    def make(**options):
        lines = []
        for group in range(6):
            for index in range(4):
                count = 1 + (group + index) % 4
                tools = [[20 + 7 * index, 0.2 * (1 + group), 60 + 10 * turn] for turn in range(count - 1)]
                lines.append(with_turns(*tools, [30 + group, None, 0], group=f"g{group}", index=index))
        return choose_workload(str(write(*lines)), instances=2, **options)

    return make


class Watch:
    """An observer of the answers: of which request, when asked, when answered, and with how many tokens."""

    def __init__(self):
        self.asked, self.answers = {}, []

    def observe(self, now, event, commands):
        if isinstance(event, EnvironmentAnswered):
            self.answers.append((event.request_id, now - self.asked.pop(event.request_id), event.tokens))
        for command in commands:
            if isinstance(command, AskEnvironment):
                self.asked[command.request_id] = now


def test_lines_of_a_group_become_its_responses_by_index(write):
    path = write(with_turns([5, None, 0], index=1), LINE, {**LINE, "group": "b", "reward": 0.5})
    ((seven, b),) = read_lengths(path)
    assert (seven.id, seven.prompt_tokens, seven.output_tokens) == ("7", 30, (153, 5))
    assert seven.turns[0] == (RecordedTurn(40, 0.5, 100), RecordedTurn(13, None, 0))
    assert (b.id, b.output_tokens, b.max_tokens, seven.max_tokens) == ("b", (153,), 153, 153)


def test_iterations_are_kept_apart_and_lines_selected(write):
    path = write({**LINE, "iteration": 1}, LINE, {**LINE, "group": "b"})
    assert [len(groups) for groups in read_lengths(path)] == [2, 1]
    assert [len(groups) for groups in read_lengths(path, ["iteration=1"])] == [1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (with_turns(), "turns: expected `array` of length >= 1"),
        (with_turns([4, 0.1]), r"turns\[0\]: expected `array` of .*length 3"),
        (with_turns([4, 0.1, 3, 9]), r"turns\[0\]: expected `array` of .*length 3"),
        (with_turns([0, 0.1, 3]), r"turns\[0\]\[0\]: expected `int` >= 1"),
        (with_turns([4, -0.1, 3]), r"turns\[0\]\[1\]: expected `float` >= 0.0"),
        (with_turns([4, 1e9, 3]), r"turns\[0\]\[1\]: expected `float` <= 1000000.0"),
        (with_turns([4, "1", 3]), r"turns\[0\]\[1\]: expected `float \| null`"),
        (with_turns([4, 0.1, -3]), r"turns\[0\]\[2\]: expected `int` >= 0"),
        (with_turns([4, 0.1, 10**9]), r"turns\[0\]\[2\]: expected `int` <= 10000000"),
        (
            with_turns(*[[9_000_000, 0.1, 9_000_000]] * 2),
            "turns have 36000000 tokens; a trajectory has 10000000",
        ),
        (with_turns([4, None, 3]), r"turns\[0\] has an answer and no tool; give the tool's seconds"),
        (with_turns([4, 0.1, 0], [3, None, 0]), r"turns\[0\] has no answer, and is not the last"),
        (with_turns([4, None, 0], [3, None, 0]), r"turns\[0\] has no answer, and is not the last"),
        ({**LINE, "index": -1}, "index: expected `int` >= 0"),
        ({**LINE, "group": "good"}, "index 0 of group 'good' of iteration 0 is in line 1 already"),
        (
            {**LINE, "group": "good", "index": 1, "prompt_tokens": 31},
            "prompt_tokens is 31, and in line 1 of group 'good' of iteration 0 30",
        ),
        ({"group": 7, "prompt_tokens": 3, "output_tokens": [5]}, "object missing required field `index`"),
        ("{not json", "not valid JSON"),
    ],
    ids=str,
)
def test_a_bad_line_is_named_by_its_number(write, line, words):
    with pytest.raises(PromptError, match=rf"turns\.jsonl:2: .*{words}"):
        read_lengths(write({**LINE, "group": "good"}, line))


def test_lengths_of_groups_may_have_a_key_called_turns(write):
    line = {"group": 1, "prompt_tokens": 3, "output_tokens": [5], "turns": "many"}
    assert read_lengths(write(line))[0][0].turns == ()


@pytest.mark.parametrize("name", ["verl", "sticky", "divided", "context", "cache-ttl"])
def test_each_turn_has_its_tokens_and_each_tool_its_time_under_every_policy(agents, name):
    workload, watch = agents(), Watch()
    run = simulate(workload, POLICIES[name], observers=[watch])
    assert run.summary.requests == 24
    groups = {group.id: group for group in workload.groups(0)}
    answers = {}
    for request_id, seconds, tokens in watch.answers:
        answers.setdefault(request_id, []).append((pytest.approx(seconds), tokens))
    for group_id, group in groups.items():
        for index, turns in enumerate(group.turns):
            recorded = [(turn.tool_s or 0.0, turn.answer_tokens) for turn in turns]
            assert answers[f"{group_id}/{index}"] == recorded
    if name != "partial":
        assert run.summary.tokens == sum(sum(group.output_tokens) for group in groups.values())
        answered = sum(
            turn.answer_tokens for group in groups.values() for turns in group.turns for turn in turns
        )
        assert run.summary.environment_tokens == answered
        written = run.summary.tokens - answered
        assert run.throughput_tokens_per_s == pytest.approx(written / run.summary.total_time_s)
    assert run.trajectories_per_hour == pytest.approx(24 * 3600 / run.summary.total_time_s)


def test_longer_tools_take_longer_and_longer_turns_have_more_tokens(agents):
    plain = simulate(agents(), POLICIES["context"])
    slow = simulate(agents(tool_times=100.0), POLICIES["context"])
    none = simulate(agents(tool_times=0.0), POLICIES["context"])
    long = simulate(agents(turn_tokens=3.0), POLICIES["context"])
    assert slow.summary.environment_s == pytest.approx(100 * plain.summary.environment_s)
    assert slow.summary.total_time_s > plain.summary.total_time_s >= none.summary.total_time_s
    assert none.summary.environment_s == 0
    assert long.summary.tokens == 3 * plain.summary.tokens
    assert slow.summary.tokens == plain.summary.tokens


def test_joined_trajectories_have_the_turns_of_all_and_the_prompts_between(write):
    lines = [
        LINE,
        {**LINE, "index": 1},
        with_turns([5, 0.3, 0], group="b", prompt_tokens=9),
        with_turns([6, None, 0], group="b", prompt_tokens=9, index=1),
        with_turns([7, 0.4, 2], [8, None, 0], group="c", prompt_tokens=11),
    ]
    (groups,) = choose_workload(str(write(*lines)), join=2).lengths
    assert [group.prompt_tokens for group in groups] == [30, 11]
    first = RecordedTurn(40, 0.5, 100), RecordedTurn(13, 0.0, 9)
    assert groups[0].turns == ((*first, RecordedTurn(5, 0.3, 0)), (*first, RecordedTurn(6, None, 0)))
    assert groups[0].output_tokens == (167, 168)
    assert groups[1].turns == ((RecordedTurn(7, 0.4, 2), RecordedTurn(8, None, 0)),)
    assert {group.max_tokens for group in groups} == {168}
    assert simulate(choose_workload(str(write(*lines)), join=2), POLICIES["context"]).turns is not None


def test_a_tool_may_take_longer_than_environments_usually_may(agents):
    run = simulate(agents(tool_times=1000.0), POLICIES["divided"])
    assert run.summary.finish_reasons == {"stop": 24}
    assert run.summary.total_time_s > 1000


def test_kv_that_was_lost_between_turns_is_not_counted_as_found(agents):
    roomy = simulate(agents(pressure=0.5), POLICIES["sticky"]).turns
    crowded = simulate(agents(pressure=8.0), POLICIES["sticky"]).turns
    pooled = simulate(agents(pressure=8.0), POLICIES["divided"]).turns
    assert 0.85 < roomy.kv_hits <= 1.0  # all whole blocks of short contexts
    assert crowded.kv_hits < roomy.kv_hits
    assert pooled.kv_hits == pytest.approx(roomy.kv_hits, abs=0.01)


def test_the_longest_wait_is_from_an_answer_to_the_step_that_follows(write):
    """One instance has one slot: a turn waits behind all first turns, and behind none if it is alone."""
    lines = [with_turns([10, 0.0, 16], [10, None, 0], index=index) for index in range(5)]
    slot = ["engine.sim.max_running=1"]
    alone = simulate(choose_workload(str(write(*lines[:1])), instances=1), POLICIES["sticky"], 0, slot)
    queued = simulate(choose_workload(str(write(*lines)), instances=1), POLICIES["sticky"], 0, slot)
    assert alone.turns.longest_wait_s == pytest.approx(0, abs=1e-9)
    assert queued.turns.longest_wait_s == pytest.approx(0.4 * queued.summary.total_time_s, rel=0.15)


@pytest.mark.parametrize("option", ["tool_times", "turn_tokens", "join"])
def test_factors_are_for_recorded_turns(write, option):
    lengths = write({"group": 7, "prompt_tokens": 3, "output_tokens": [5, 9]})
    words = option.replace("_", "-")
    for name in (str(lengths), "synthetic", "moonlight"):
        with pytest.raises(ConfigError, match=f"--{words} does not go with"):
            choose_workload(name, **{option: 2})


def test_the_command_shows_what_matters_for_agents_and_writes_it(seer, write, tmp_path):
    path = write(LINE, {**LINE, "index": 1})
    out = tmp_path / "out.json"
    done = seer("sim", path, "--policy", "sticky", "--tool-times", 4, "--turn-tokens", 2, "--json", out)
    assert done.exit_code == 0, done.output
    for words in ("trajectories", "KV hits", "longest", "a trajectory of 2.0 turns on average", "take 2 s"):
        assert words in done.output
    (row,) = json.loads(out.read_text())
    assert row["trajectories_per_hour"] == pytest.approx(2 * 3600 / row["total_time_s"])
    assert 0 < row["turn_kv_hits"] <= 1
    assert row["turn_wait_s"] >= 0


def test_recorded_drafts_are_refused(seer, write):
    path = write(LINE)
    done = seer("sim", path, "--drafts", path)
    assert done.exit_code == 2
    assert "--drafts does not go with recorded turns" in done.output


def test_tool_times_may_be_swept(seer, write):
    done = seer(
        "sweep", write(LINE), "--policy", "sticky", "--policy", "divided", "--over", "tool_times=1,10"
    )
    assert done.exit_code == 0, done.output
    assert "tool_times" in done.output
