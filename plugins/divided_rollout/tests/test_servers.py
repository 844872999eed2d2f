"""Whole responses on servers that share no KV: which end, when, and that no token depends on it."""

import pytest
from seer_divided_rollout import KvAware
from seer_divided_rollout.servers import Server
from seer_divided_rollout.splitter import AffordableChunks, Chunks
from seer_testing.harness import SchedulerHarness

from seer_core.model import GroupContext, InstanceInfo, InstanceStatus, Request
from seer_core.model.events import (
    ChunkFinished,
    Dispatch,
    EndChunk,
    GroupSpec,
    InstanceReported,
    InstanceStarted,
)
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

    def write(self, name: str, running: int, steps: int, per_event: float = 1.0) -> None:
        """Report so many steps of some responses, which share a prompt of ten tokens."""
        for step in range(1, steps + 1):
            used = 10 + running * step * per_event
            assert not self.report(name, running, 0, used / self.instances[name].kv_capacity_tokens)


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
    cluster.write("a", 4, 240)
    ended = [key for step in range(241, 260) for key in cluster.report("a", 3, 1, (10 + 3 * step) / 1000)]
    assert ended == ["g/3"], "the server has stopped the newest, and it ends once"
    assert sent(cluster.finish("g/3", 236)) == {}, "it waits: there is no room yet"
    assert sent(cluster.finish("g/0", 244, stopped=True))["g/3"].max_tokens == 264


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


def slow_and_fast(faster: float = 8.0) -> tuple[Cluster, list[str], list[str]]:
    """Return two servers, one faster than the other, and the four responses that each has had for a while."""
    cluster = Cluster()
    cluster.serve("slow", 2000)
    cluster.serve("fast", 2000)
    cluster.group("g", n=8, max_tokens=1000)
    here = [key for key, chunk in cluster.in_flight.items() if chunk.instance_id == "slow"]
    there = [key for key in cluster.in_flight if key not in here]
    assert len(here) == len(there) == 4
    cluster.write("fast", 4, 32, faster)
    return cluster, here, there


def leaving(cluster: Cluster, ended: list[str]) -> list[str]:
    """End responses of which each step took 0.03 s, and return those that leave their server then."""
    commands = [each for key in ended for each in cluster.finish(key, 290, stopped=True)]
    return [each.request_id for each in commands if isinstance(each, EndChunk)]


def test_the_longest_leave_a_slow_server_once_nothing_waits():
    cluster, here, there = slow_and_fast()
    left = cluster.report("slow", 4, 0, (10 + 4 * 33) / 2000)
    assert left == here[::-1]
    assert leaving(cluster, there[:3]) == []
    assert [sent(cluster.finish(key, 30))[key].instance_id for key in left] == ["fast"] * 4


def test_no_more_leave_at_once_than_keep_steps_shorter():
    cluster, here, there = slow_and_fast(faster=1.4)
    left = cluster.report("slow", 4, 0, (10 + 4 * 33) / 2000)
    assert left == [here[-1], here[-2]], "with six a step may take 1.5 times as long as with four"
    assert leaving(cluster, there[:3]) == []
    assert sent(cluster.finish(left[0], 30))[left[0]].instance_id == "fast"
    assert cluster.report("slow", 3, 0, (10 + 3 * 34) / 2000) == []


def test_no_response_leaves_for_a_time_that_no_load_has_shown():
    cluster, _, there = slow_and_fast()
    assert leaving(cluster, there[:3]) == [], "the slow server's time is that of a request alone"


def test_a_response_has_no_more_to_come_than_its_limit():
    group = GroupContext("g", 0, 2, prompt_tokens=10, max_tokens=100)
    group.finished, group.longest_finished_tokens = 1, 60
    request = Request(group, 0)
    server = Server(InstanceStatus(InstanceInfo("a", 1000, 1, 8, 1000), 0), 0.25, 0.0)
    server.add(request)
    assert server.left(request) == 60
    server.move(9.0)
    server.correct(1, 0, 0.1)
    assert server.left(request) == 10


def test_a_server_that_stands_empty_gets_responses_again_after_others_used_it():
    cluster = Cluster()
    cluster.serve("a")
    cluster.serve("b")
    first = sent(cluster.group("g", n=4, max_tokens=100))
    cluster.report("a", 2, 0, 0.9)  # by other clients, too
    for key in first:
        cluster.finish(key, 50, stopped=True)
    cluster.report("a", 0, 0, 0.0)
    chunks = sent(cluster.group("h", n=4, max_tokens=100)).values()
    assert sorted(chunk.instance_id for chunk in chunks) == ["a", "a", "b", "b"]


def test_a_prompt_that_no_sibling_holds_is_computed_again_after_an_end():
    info = InstanceInfo("a", 1000, 1, 8, 1000, prefill_s_per_token=0.01, shares_prompts=True)
    server = Server(InstanceStatus(info, 0), 0.01, 0.0)
    group = GroupContext("g", 0, 2, prompt_tokens=300, max_tokens=100)
    one, other = Request(group, 0), Request(group, 1)
    server.add(one)
    assert server.cost_s(one, 300) == pytest.approx(3.0)
    assert not server.frees(one)
    server.add(other)
    assert server.cost_s(one, 300) == pytest.approx(0.01), "of the prompt's last token"
    assert server.frees(one)


def test_a_response_goes_to_the_server_for_which_it_was_ended():
    cluster, _, there = slow_and_fast()
    left, *_ = cluster.report("slow", 4, 0, (10 + 4 * 33) / 2000)
    leaving(cluster, there[:3])
    cluster.report("fast", 1, 0, 0.7)
    assert sent(cluster.finish(left, 30))[left].instance_id == "fast", "though less is free there"


def test_a_report_corrects_steps_and_their_time_until_a_chunk_has_timed_them():
    server = Server(InstanceStatus(InstanceInfo("a", 1000, 1, 8, 1000), 0), 0.25, 0.0)
    group = GroupContext("g", 0, 4, prompt_tokens=10, max_tokens=100)
    requests = [Request(group, index) for index in range(4)]
    for request in requests:
        server.add(request)
    server.move(8.0)
    assert server.written(requests[0]) == 0, "no load has shown how long a step takes"
    server.correct(4, 0, (40 + 4 * 16) / 1000)
    assert server.written(requests[0]) == pytest.approx(16)
    server.move(9.0)
    assert server.written(requests[0]) == pytest.approx(18)
    server.correct(2, 2, (20 + 2 * 36) / 1000)
    assert [server.written(each) for each in requests] == pytest.approx([36] * 4)
    assert server.free_tokens == pytest.approx(1000 - 40 - 4 * 36)


def server_with(responses: int) -> tuple[Server, list[Request]]:
    """Return a server of 1,000 tokens with responses that have each begun with ten, a second ago."""
    server = Server(InstanceStatus(InstanceInfo("a", 1000, 1, 8, 1000), 0), 0.25, 0.0)
    group = GroupContext("g", 0, responses, prompt_tokens=10, max_tokens=100)
    requests = [Request(group, index) for index in range(responses)]
    for request in requests:
        server.add(request)
    server.move(1.0)
    return server, requests


def test_a_report_that_is_older_than_the_responses_there_takes_none_of_their_kv_for_free():
    server, _ = server_with(4)
    server.correct(1, 0, 0.011)
    assert server.free_tokens == pytest.approx(1000 - 11 - 3 * 10)
    assert not server.timed, "three of four are not in it"


def test_a_report_that_still_has_responses_which_are_over_takes_none_of_their_kv_for_used():
    server, requests = server_with(4)
    server.correct(4, 0, 0.2)
    for request in requests[:3]:
        server.drop(request, ChunkFinished(request.id, "a", 40, True))
    server.correct(4, 0, 0.25)
    assert server.free_tokens == pytest.approx(1000 - 250 + 3 * server.own_kv(requests[3]))
    server.drop(requests[3], ChunkFinished(requests[3].id, "a", 40, True))
    server.move(6.5)
    server.correct(2, 0, 0.3)
    assert server.free_tokens == pytest.approx(700), "after so long it is of other clients"


def test_a_server_that_is_empty_between_two_rollouts_gets_half_of_the_second_in_spite_of_late_reports():
    cluster = Cluster()
    cluster.serve("a")
    cluster.serve("b")
    first = cluster.group("g", n=4, max_tokens=100)
    for name in ("a", "b"):
        cluster.report(name, 2, 0, 0.12)
    for key in sent(first):
        cluster.finish(key, 50, stopped=True)
    cluster.report("a", 2, 0, 0.13)
    chunks = sent(cluster.group("h", n=4, max_tokens=100)).values()
    assert sorted(chunk.instance_id for chunk in chunks) == ["a"] * 2 + ["b"] * 2


def test_a_server_that_is_slower_for_its_many_responses_gives_so_many_that_both_are_alike():
    cluster = Cluster()
    cluster.serve("many", 2000)
    cluster.group("g", n=6, max_tokens=1000)
    cluster.serve("few", 2000)
    cluster.group("h", n=2, max_tokens=1000)
    assert [chunk.instance_id for chunk in cluster.in_flight.values()] == ["many"] * 6 + ["few"] * 2
    cluster.write("few", 2, 32, 3.0)
    left = cluster.report("many", 6, 0, (10 + 6 * 33) / 2000)
    assert len(left) == 2
    assert [sent(cluster.finish(key, 30))[key].instance_id for key in left] == ["few"] * 2
    assert cluster.report("many", 4, 0, (10 + 4 * 35) / 2000) == [], "the time with four is not known yet"


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
