import msgspec
import pytest
from hypothesis import strategies as st
from seer_baselines.streamrl_oracle import Settings, StreamRLOracle
from seer_host.config_files import make_config
from seer_session.assembly import fill_slots
from seer_testing.rollouts import outlast_arrivals, roll_out_at_random

from seer_core.errors import PromptError
from seer_core.model import InstanceInfo
from seer_core.model.events import (
    ChunkFinished,
    Dispatch,
    GroupSpec,
    GroupsSubmitted,
    InstanceLost,
    InstanceStarted,
)
from seer_core.scheduling.scheduler import Policies, Scheduler, Slot


def scheduler_of(long_share=0.5):
    both = StreamRLOracle(long_share)
    return Scheduler(
        Policies(prioritizer=Slot("prioritizer", "streamrl", both), placer=Slot("placer", "streamrl", both))
    )


def start(scheduler, *names, kv=2000, slots=100):
    return [
        command
        for name in names
        for command in scheduler.handle(InstanceStarted(InstanceInfo(name, kv, 1, slots, 2000)), 0.0)
    ]


def submit(scheduler, **groups):
    """Submit groups of these response lengths, with prompts of 10 tokens."""
    specs = tuple(GroupSpec(name, 10, len(each), 1000, tuple(each)) for name, each in groups.items())
    return dispatched(scheduler.handle(GroupsSubmitted(specs), 0.0))


def dispatched(commands):
    return [
        (command.request_id, command.instance_id) for command in commands if isinstance(command, Dispatch)
    ]


def finish(scheduler, request_id, instance_id, tokens):
    return dispatched(scheduler.handle(ChunkFinished(request_id, instance_id, tokens, True), 1.0))


def test_one_object_fills_both_slots_of_a_run_and_another_those_of_the_next(tmp_path):
    tables = {"seer": {"plugins": ["streamrl_oracle"], "engine": "sim"}}
    config = make_config(tables, base_dir=tmp_path, origin="a test")
    first, other = (fill_slots(config).policies for _ in range(2))
    assert first.prioritizer.strategy is first.placer.strategy
    assert first.prioritizer.strategy is not other.prioritizer.strategy
    assert isinstance(first.placer.strategy, StreamRLOracle)


def test_long_groups_have_an_instance_of_their_own():
    scheduler = scheduler_of()
    start(scheduler, "a", "b")
    sent = submit(scheduler, short=[100, 90], long=[900, 80], tiny=[5, 5], huge=[950, 950])
    home = {name.partition("/")[0]: instance for name, instance in sent}
    assert {home.get("huge"), home.get("long", "a")} == {"a"}
    assert {home["short"], home["tiny"]} == {"b"}


def test_groups_start_whole_and_the_longest_first():
    scheduler = scheduler_of(0.0)
    start(scheduler, "a")
    sent = submit(scheduler, short=[30, 20], long=[40, 10])
    assert [name for name, _ in sent] == ["long/0", "long/1", "short/0", "short/1"]


def test_long_responses_run_fewer_at_a_time():
    for length, at_once in ((50, 20), (900, 4)):
        scheduler = scheduler_of(0.0)
        start(scheduler, "a", kv=2000)
        sent = submit(scheduler, **{f"g{n}": [length, length] for n in range(30)})
        mean_context = 10 + length / 2
        assert len(sent) <= 2000 / mean_context
        assert len(sent) >= at_once


def test_a_group_waits_until_all_of_it_finds_room():
    scheduler = scheduler_of(0.0)
    start(scheduler, "a", slots=2)
    assert len(submit(scheduler, long=[50, 50], short=[40, 40])) == 2
    assert finish(scheduler, "long/0", "a", 50) == []
    assert finish(scheduler, "long/1", "a", 50) == [("short/0", "a"), ("short/1", "a")]


def test_a_group_larger_than_the_limit_runs_on_an_empty_instance():
    scheduler = scheduler_of(0.0)
    start(scheduler, "a", slots=2)
    assert len(submit(scheduler, one=[50] * 5)) == 5


def test_a_lost_instance_s_groups_are_bound_again():
    scheduler = scheduler_of(0.0)
    start(scheduler, "a", "b")
    home = dict(submit(scheduler, one=[50, 50], two=[40, 40]))
    lost = home["one/0"]
    moved = dispatched(scheduler.handle(InstanceLost(lost, "test"), 1.0))
    assert {name for name, _ in moved} == {name for name, where in home.items() if where == lost}
    assert {where for _, where in moved} == {"a", "b"} - {lost}


def test_groups_without_an_instance_wait_for_one():
    scheduler = scheduler_of()
    assert submit(scheduler, one=[50, 50], two=[5, 5]) == []
    assert len(dispatched(start(scheduler, "a"))) == 4


def test_later_groups_join_in():
    scheduler = scheduler_of()
    start(scheduler, "a", "b")
    submit(scheduler, one=[50, 50])
    assert len(submit(scheduler, two=[60, 5], three=[1, 1])) == 4


@pytest.mark.parametrize("lengths", [None, (5,)], ids=["none", "too few"])
def test_missing_lengths_are_an_error_that_names_the_group_and_the_remedy(lengths):
    scheduler = scheduler_of()
    with pytest.raises(PromptError, match=r"'streamrl_oracle' needs the true lengths of group 'g'.*seer sim"):
        scheduler.handle(GroupsSubmitted((GroupSpec("g", 10, 2, 100, lengths),)), 0.0)


def test_the_share_is_checked():
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"long_share": 1.5}, Settings)


def policies_of(long_share):
    def make():
        both = StreamRLOracle(long_share)
        return Policies(
            prioritizer=Slot("prioritizer", "streamrl", both), placer=Slot("placer", "streamrl", both)
        )

    return make


def test_random_rollouts_lose_nothing():
    roll_out_at_random(st.sampled_from([0.0, 0.3, 1.0]).map(policies_of))


def test_no_request_waits_for_ever_while_others_arrive():
    outlast_arrivals(policies_of(0.3))
