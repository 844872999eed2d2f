"""The steps of instances side by side in a report: at equal batches and contexts, with the cause named."""

import re

import pytest
from seer_cli.report.data import run_of
from seer_cli.report.reading import RunReader
from seer_trace.records import TraceRecord, read_trace

from seer_core.model import InstanceInfo
from seer_core.model.events import (
    ChunkFinished,
    Complete,
    Dispatch,
    GroupSpec,
    GroupsSubmitted,
    InstanceReported,
    InstanceStarted,
)

ENGINES = """[seer]
engine = "sim"
plugins = {plugins}
kv_pool = "{pool}"
[rollout]
n = 8
max_tokens = 4096
[engine.sim]
instances = {instances}
kv_capacity_tokens = {kv}
max_model_tokens = 8192
lengths = {{ mean_tokens = 800, sigma = {sigma}, group_share = 0.8, cap_tokens = 4096 }}
speeds = {{ {speeds} }}
"""
CROWDED = {
    "plugins": '["group_round_robin"]',
    "pool": "none",
    "instances": 4,
    "kv": 16384,
    "sigma": 1.0,
    "speeds": "",
}
ROOMY = {**CROWDED, "kv": 131072}
CHUNKS = {**CROWDED, "plugins": '["divided_rollout", "context_sched"]', "pool": "sim_pool"}
UNEVEN = {**ROOMY, "plugins": '["divided_rollout"]', "pool": "sim_pool", "instances": 2, "sigma": 1.5}


@pytest.fixture
def shown(seer, write_prompts, tmp_path):
    """Return a function that makes a run of simulated instances and returns what a report shows of it."""

    def roll_out(settings, groups=48):
        (tmp_path / "run.toml").write_text(ENGINES.format(**settings))
        prompts = write_prompts(*({"prompt": f"question {number}"} for number in range(groups)))
        result = seer("run", tmp_path / "run.toml", "--prompts", prompts, "--out", tmp_path / "out")
        assert result.exit_code == 0, result.output
        reader = RunReader()
        for record in read_trace(tmp_path / "out" / "trace.jsonl"):
            reader.read(record)
        return run_of(reader, "x")

    return roll_out


@pytest.mark.parametrize(
    ("settings", "groups"),
    [(CROWDED, 48), (ROOMY, 48), (CHUNKS, 48), (UNEVEN, 4)],
    ids=["crowded", "roomy", "chunks", "uneven"],
)
def test_no_instance_is_called_slow_where_all_are_equal(shown, settings, groups):
    run = shown(settings, groups)
    assert [each.title for each in run.findings if each.instance] == []
    assert all(lane.slowness is None or lane.slowness < 1.2 for lane in run.lanes)


def test_a_wait_in_an_engine_s_own_queue_is_named_and_no_instance_accused(shown):
    run = shown(CROWDED)
    long = next(lane for lane in run.lanes if lane.pace)
    assert "because its requests waited longer in its own queue" in long.pace
    assert f"At equal batches and contexts they took {long.slowness:.2f} times as long." in long.pace


@pytest.mark.parametrize("times", [2, 10])
@pytest.mark.parametrize("settings", [CROWDED, ROOMY, CHUNKS], ids=["crowded", "roomy", "chunks"])
def test_an_instance_at_a_part_of_the_speed_is_found_and_needs_no_look(shown, settings, times):
    run = shown({**settings, "speeds": f"sim-1 = {1 / times}"})
    (slow,) = [each for each in run.findings if each.instance]
    assert slow.title == "Instance sim-1 was slow"
    assert run.lanes[1].slowness == pytest.approx(times, rel=0.15)
    assert all(lane.slowness < 1.2 for lane in run.lanes if lane.name != "sim-1")
    assert "it is slower" in run.lanes[1].pace
    assert "See what else" not in slow.text


def read(*records):
    reader = RunReader()
    for now, event, *commands in records:
        reader.read(TraceRecord(now, event, list(commands)))
    return run_of(reader, "x")


def started(name, **more):
    return InstanceStarted(InstanceInfo(name, 100_000, 1, 64, 50_000, **more))


def side_by_side(lanes, **more):
    """Return the run of instances of which each has some requests, with so much context and step time.

    Every request runs 100 steps.
    """
    records = [(0.0, started(name, **more)) for name in lanes]
    groups = [GroupSpec(name, 1, requests, 900) for name, (requests, _, _) in lanes.items()]
    records.append((0.0, GroupsSubmitted(tuple(groups))))
    for name, (requests, context, _) in lanes.items():
        sent = [Dispatch(f"{name}/{number}", name, 100, context, False) for number in range(requests)]
        records.append((0.0, InstanceReported(name, requests, 0, requests * context / 100_000), *sent))
    for name, (requests, _, step_s) in sorted(lanes.items(), key=lambda each: each[1][2]):
        for number in range(requests):
            over = ChunkFinished(f"{name}/{number}", name, 100, True, steps=100)
            records.append((100 * step_s, over, Complete(f"{name}/{number}", "stop")))
    return read(*records)


def test_steps_over_longer_contexts_are_compared_with_none_and_say_so():
    run = side_by_side({"a": (4, 1_000, 0.010), "b": (4, 9_000, 0.017)})
    long = run.lanes[1]
    assert long.slowness is None
    assert long.pace == (
        "Steps on b took 1.70 times as long as on the others, because its contexts were longer"
        " (9,000 tokens, not 1,000)."
    )
    assert [each for each in run.findings if each.instance] == []


def test_steps_of_larger_batches_say_so():
    run = side_by_side({"a": (4, 1_000, 0.010), "b": (16, 1_000, 0.015)})
    assert "because its batches were larger (16.0 requests, not 4.0)." in run.lanes[1].pace


def test_between_similar_loads_the_growth_of_steps_is_that_of_the_others():
    run = side_by_side(
        {
            "a": (4, 1_100, 0.0110),
            "b": (4, 4_000, 0.0400),
            "c": (4, 1_900, 0.0190),  # as its context says, though it shares its kind with the first
        }
    )
    assert run.lanes[2].slowness == pytest.approx(1.0, abs=0.05)


def test_only_a_real_instance_is_worth_a_look_at_its_machine():
    lanes = {"quick": (4, 1_000, 0.010), "lame": (4, 1_000, 0.020)}
    for more, advice in (({}, False), ({"model": "4c0d"}, True)):
        run = side_by_side(lanes, **more)
        slow = next(each for each in run.findings if each.instance == "lame")
        assert slow.text.endswith("See what else runs on its machine.") == advice


def test_the_longest_response_on_a_slow_instance_would_have_ended_sooner_on_another():
    run = side_by_side({"quick": (4, 1_000, 0.010), "lame": (1, 1_000, 0.020), "other": (1, 1_000, 0.010)})
    longest = next(each for each in run.findings if each.title.endswith("was the longest"))
    assert "Of the 2.0 s, 2.0 s were on lame" in longest.text
    assert "it would have run for 1.0 s" in longest.text
    assert "No order" not in longest.text


WHOLE = {**ROOMY, "speeds": "sim-1 = 0.1"}


def test_the_last_response_that_stayed_on_a_slow_instance_says_what_another_would_have_saved(shown):
    run = shown(WHOLE)
    stayed = next(each for each in run.findings if "stayed" in each.title)
    assert re.fullmatch(
        r"[\d,]+ of its tokens took [\d,]+\.\d s on sim-1 while sim-\d( and sim-\d)* had nothing to do\."
        r" There they would have taken [\d,]+\.\d s(, with [\d.]+ s for its context)?\."
        r" It ran whole; in chunks it could have moved\.",
        stayed.text,
    )
    assert stayed.title == f"Response {stayed.request} stayed on a slow instance"
    assert 0.5 < stayed.share < 0.9


@pytest.mark.parametrize("settings", [ROOMY, CHUNKS, {**CHUNKS, "kv": 131072, "speeds": "sim-1 = 0.1"}])
def test_no_response_is_said_to_have_stayed_where_none_did(shown, settings):
    run = shown(settings)
    assert [each.title for each in run.findings if "stayed" in each.title] == []


def test_what_a_move_costs_is_in_the_time_that_another_instance_would_have_taken():
    lanes = {"quick": (5, 1_100, 0.010), "lame": (5, 1_100, 0.090)}
    stayed = next(
        each for each in side_by_side(lanes, prefill_s_per_token=0.5).findings if "stayed" in each.title
    )
    # From 1 s on; 11 of its 100 tokens, and its prompt of one token, were there then.
    assert stayed.text.startswith("89 of its tokens took 8.0 s on lame while quick had nothing to do. There")
    assert "they would have taken 6.9 s, with 6.1 s for its context." in stayed.text
