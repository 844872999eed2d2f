"""Whole responses on servers that share no KV: which end, when, and that no token depends on it."""

import pytest
from seer_divided_rollout import KvAware
from seer_divided_rollout.splitter import AffordableChunks, Chunks
from seer_testing.harness import SchedulerHarness

from seer_core.model import GroupContext, InstanceInfo, InstanceStatus, Request
from seer_core.model.events import Dispatch, EndChunk, GroupSpec, InstanceReported, InstanceStarted
from seer_core.scheduling.scheduler import Policies, Slot

pytest_plugins = ["seer_testing.simulate"]

GROUPS = [(400, 380, 120, 410)] * 4
TIGHT = {"kv_capacity_tokens": 1024, "request_s": 0.005}


class Cluster(SchedulerHarness):
    """Servers without a block's rounding, whose steps take as long as an event."""

    def __init__(self) -> None:
        placer, splitter = KvAware(0.25, 0.75, whole_on_servers=True), AffordableChunks(whole_on_servers=True)
        super().__init__(
            Policies(splitter=Slot("splitter", "test", splitter), placer=Slot("placer", "test", placer))
        )

    def serve(self, name: str, kv: int = 1000, **further):
        """Start a server."""
        info = InstanceInfo(name, kv, 1, 8, kv, overcommits=True, step_s=0.25, **further)
        self.instances[name] = info
        return self.handle(InstanceStarted(info))

    def report(self, name: str, running: int, waiting: int, usage: float) -> list[str]:
        """Report, and return the requests that are to end."""
        commands = self.handle(InstanceReported(name, running, waiting, usage))
        return [each.request_id for each in commands if isinstance(each, EndChunk)]


def sent(commands):
    return {each.request_id: each for each in commands if isinstance(each, Dispatch)}


def ended(rollout):
    return [
        command
        for record in rollout.trace
        for command in record.commands
        if isinstance(command, EndChunk) and command.reason == "goes_on"
    ]


@pytest.mark.parametrize("order", ["context_sched", "length_posterior"])
def test_no_token_depends_on_where_a_response_is_divided(simulation, order):
    whole = simulation.run([], GROUPS, **TIGHT)
    lazily = simulation.run(["divided_rollout", order], GROUPS, **TIGHT)
    kill = [{"instance": "sim-0", "at_s": whole.makespan_s / 3, "restart_after_s": 0.1}]
    killed = simulation.run(["divided_rollout", order], GROUPS, kill_at_s=kill, **TIGHT)
    fixed = {"divided_rollout": {"chunk_tokens": 64}}
    divided = simulation.run(["divided_rollout", order], GROUPS, settings=fixed, **TIGHT)
    assert lazily.tokens == whole.tokens == killed.tokens == divided.tokens
    assert ended(lazily)
    assert ended(killed)
    assert not ended(divided), "chunks of a given length end where they do"
    assert whole.summary.chunks == 16 < lazily.summary.chunks < divided.summary.chunks / 2


def test_a_response_is_sent_whole_and_ends_where_its_server_runs_short():
    cluster = Cluster()
    cluster.serve("a")
    assert {each.max_tokens for each in sent(cluster.group("g", n=4, max_tokens=500)).values()} == {500}
    assert cluster.report("a", 4, 0, 0.5) == []
    assert cluster.report("a", 3, 1, 0.99) == ["g/3"], "the server has stopped the newest"
    assert cluster.report("a", 3, 1, 0.999) == [], "it is to end already"
    assert sent(cluster.finish("g/3", 5)) == {}, "it waits: there is no room yet"
    assert sent(cluster.finish("g/0", 240, stopped=True))["g/3"].max_tokens == 495


def test_those_end_that_have_the_least_to_write():
    cluster = Cluster()
    cluster.serve("a")
    cluster.group("short", n=3, max_tokens=500)
    cluster.group("long", n=3, max_tokens=500)
    cluster.finish("short/0", 40, stopped=True)
    cluster.finish("long/0", 400, stopped=True)
    assert cluster.report("a", 3, 1, 0.99) == ["short/2"]


@pytest.mark.parametrize(
    ("further", "whole"), [({"exactness": "reproducible"}, False), ({}, True), ({"exactness": "exact"}, True)]
)
def test_what_cannot_be_gone_on_with_is_not_ended(further, whole):
    cluster = Cluster()
    cluster.serve("a", **further)
    cluster.submit(GroupSpec("g", 10, 4, 500, whole=whole))
    assert cluster.report("a", 3, 1, 0.99) == []


def test_at_the_level_distributed_responses_are_ended():
    cluster = Cluster()
    cluster.serve("a", exactness="distributed")
    cluster.group("g", n=4, max_tokens=500)
    assert cluster.report("a", 3, 1, 0.99) == ["g/3"]


def test_the_longest_leaves_a_slow_server_once_nothing_waits():
    cluster = Cluster()
    cluster.serve("slow")
    cluster.serve("fast")
    cluster.group("g", n=8, max_tokens=1000)
    here = [key for key, chunk in cluster.in_flight.items() if chunk.instance_id == "slow"]
    there = [key for key in cluster.in_flight if key not in here]
    assert len(here) == len(there) == 4
    for _ in range(32):
        cluster.report("fast", 4, 0, 0.1)
    leaving = []
    for request in there[:3]:  # their steps took 0.03 s, by the time since they were sent
        commands = cluster.finish(request, 290, stopped=True)
        leaving += [each.request_id for each in commands if isinstance(each, EndChunk)]
    assert leaving == [here[-1]], "one at a time, until the slow server has been timed again"
    assert sent(cluster.finish(leaving[0], 30))[leaving[0]].instance_id == "fast"


def test_other_instances_keep_their_chunks():
    splitter = AffordableChunks(whole_on_servers=True)
    request = Request(GroupContext("g", 0, 1, prompt_tokens=10, max_tokens=1000), 0)

    def start(seq, **further):
        status = InstanceStatus(InstanceInfo(f"i{seq}", 4096, 16, 8, 4096, **further), seq)
        splitter.instance_started(status)
        return status

    server = start(0, overcommits=True)
    assert splitter.split(request) == 1000
    assert "whole" in splitter.explain()
    shares = start(1, overcommits=True, fetch_s_per_token=1e-6)
    assert splitter.split(request) < 1000
    assert "whole" not in splitter.explain()
    splitter.instance_lost(shares)
    assert splitter.split(request) == 1000
    start(2, ends_early=True)
    splitter.instance_lost(server)
    assert splitter.split(request) < 1000
    assert Chunks(64).split(request) == 64
