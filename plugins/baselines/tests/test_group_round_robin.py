from types import SimpleNamespace

import pytest
from seer_baselines.group_round_robin import GroupRoundRobin, seer_make_placer
from seer_host.contract_checks import flaw_of

from seer_core.model import InstanceInfo
from seer_core.model.events import Dispatch, GroupSpec, GroupsSubmitted, InstanceLost, InstanceStarted
from seer_core.ports.policy import Placer
from seer_core.scheduling.scheduler import Policies, Scheduler, Slot


@pytest.fixture
def scheduler():
    return Scheduler(Policies(placer=Slot("placer", "group_round_robin", GroupRoundRobin())))


def start(scheduler, *names, slots=2):
    return [
        command
        for name in names
        for command in scheduler.handle(InstanceStarted(InstanceInfo(name, 100, 1, slots, 100)), 0.0)
    ]


def submit(scheduler, *names, n=2):
    return scheduler.handle(GroupsSubmitted(tuple(GroupSpec(name, 10, n, 50) for name in names)), 0.0)


def homes(commands):
    """Map each group to the instances its chunks went to."""
    found = {}
    for command in commands:
        if type(command) is Dispatch:
            found.setdefault(command.request_id.partition("/")[0], set()).add(command.instance_id)
    return found


def test_it_is_a_placer_and_the_hook_makes_one():
    assert isinstance(seer_make_placer(SimpleNamespace(), SimpleNamespace()), GroupRoundRobin)
    assert flaw_of(GroupRoundRobin(), Placer) is None


def test_group_k_goes_whole_to_instance_k_mod_n(scheduler):
    start(scheduler, "a", "b", "c")
    assert homes(submit(scheduler, "g0", "g1", "g2", "g3", n=4)) == {
        "g0": {"a"},
        "g1": {"b"},
        "g2": {"c"},
        "g3": {"a"},
    }


def test_later_groups_go_on_in_turn(scheduler):
    start(scheduler, "a", "b", "c")
    submit(scheduler, "g0", "g1")
    assert homes(submit(scheduler, "g2", "g3")) == {"g2": {"c"}, "g3": {"a"}}


def test_everything_is_sent_at_once_even_if_it_does_not_fit(scheduler):
    start(scheduler, "a", slots=1)
    submit(scheduler, "g0", n=20)
    status = scheduler.instances["a"]
    assert (scheduler.waiting, status.running) == (0, 20)
    assert status.free_kv_tokens < 0


def test_the_groups_of_a_lost_instance_move_whole_to_the_next_living_one(scheduler):
    start(scheduler, "a", "b", "c")
    submit(scheduler, "g0", "g1", "g2", "g3")
    moved = homes(scheduler.handle(InstanceLost("a", "test"), 0.0))
    assert set(moved) == {"g0", "g3"}
    assert all(len(instances) == 1 and instances <= {"b", "c"} for instances in moved.values())
    assert moved["g0"] != moved["g3"]


def test_a_moved_group_does_not_move_back(scheduler):
    start(scheduler, "a", "b")
    submit(scheduler, "g0")
    assert homes(scheduler.handle(InstanceLost("a", "test"), 0.0)) == {"g0": {"b"}}
    start(scheduler, "a")
    assert homes(scheduler.handle(InstanceLost("b", "test"), 0.0)) == {"g0": {"a"}}


def test_a_group_without_any_instance_waits_for_the_next_one(scheduler):
    start(scheduler, "a")
    submit(scheduler, "g0")
    assert scheduler.handle(InstanceLost("a", "test"), 0.0) == []
    assert homes(start(scheduler, "b")) == {"g0": {"b"}}
