"""Rivals for agents: KV kept for a time, programs that are paused, moves between turns only."""

import pytest
from seer_rivals.cache_ttl import CacheTtl
from seer_rivals.migrate_in_tools import MigrateInTools
from seer_rivals.program_pause import ProgramPause
from seer_rivals.session_queues import RESERVED_TOKENS
from seer_session.guard import guarded_policies

from seer_core.model import InstanceInfo
from seer_core.model.events import (
    ChunkFinished,
    Dispatch,
    EnvironmentAnswered,
    GroupSpec,
    GroupsSubmitted,
    InstanceLost,
    InstanceStarted,
)
from seer_core.scheduling.scheduler import Policies, Scheduler, Slot


class Play:
    """A scheduler with one strategy in both slots, and instances of some KV and many slots."""

    def __init__(self, strategy, kv_tokens=2048, instances=1, prioritizer=True):
        slots = {"placer": Slot("placer", "mine", strategy)}
        if prioritizer:
            slots["prioritizer"] = Slot("prioritizer", "mine", strategy)
        self.scheduler = Scheduler(guarded_policies(Policies(**slots)))
        self.now = 0.0
        for number in range(instances):
            self.handle(InstanceStarted(InstanceInfo(f"i{number}", kv_tokens, 16, 99, 9000)))

    def handle(self, event):
        """Return where chunks are sent by the event, by request."""
        commands = self.scheduler.handle(event, self.now)
        return {each.request_id: each.instance_id for each in commands if isinstance(each, Dispatch)}

    def submit(self, name, n=1, prompt=16):
        return self.handle(GroupsSubmitted((GroupSpec(name, prompt, n, 8000, turns=True),)))

    def end_turn(self, request_id, tokens=64):
        home = self.scheduler.buffer.get(request_id).instance
        return self.handle(ChunkFinished(request_id, home, tokens, True))

    def answer(self, request_id, tokens=16, done=False):
        return self.handle(EnvironmentAnswered(request_id, tokens, done))


@pytest.fixture(params=[CacheTtl, ProgramPause])
def sticky(request):
    """A play of two instances under a policy that keeps responses where they began."""
    return Play(CacheTtl(9.0) if request.param is CacheTtl else ProgramPause(), instances=2)


def test_a_response_comes_back_to_the_instance_that_has_its_kv(sticky):
    assert sticky.submit("a", n=2) == {"a/0": "i0", "a/1": "i1"}
    sticky.end_turn("a/0")
    sticky.submit("b")  # goes where less runs
    assert sticky.answer("a/0") == {"a/0": "i0"}


def test_a_response_whose_instance_is_lost_goes_on_elsewhere(sticky):
    sticky.submit("a", n=2)
    sticky.end_turn("a/1")
    sticky.handle(InstanceLost("i1", "test"))
    assert sticky.answer("a/1") == {"a/1": "i0"}


def test_what_waits_for_an_instance_that_is_lost_goes_on_elsewhere(sticky):
    sticky.submit("a", n=2)
    sticky.end_turn("a/1")
    moved = sticky.handle(InstanceLost("i0", "test"))
    assert moved == {"a/0": "i1"}


def test_kv_is_kept_for_its_time_and_no_longer():
    play = Play(CacheTtl(5.0), kv_tokens=RESERVED_TOKENS + 16 + 1056)
    play.submit("a", prompt=16)
    play.end_turn("a/0", 1000)
    assert play.submit("b", prompt=16) == {"b/0": "i0"}  # the only one that runs
    assert play.submit("c", prompt=16) == {}  # there is room, but for a's 1,016 tokens
    play.now = 4.9
    assert play.submit("d", prompt=16) == {}
    play.now = 5.1
    assert set(play.submit("e", prompt=16)) == {"c/0", "d/0", "e/0"}


def test_an_earlier_response_takes_the_room_that_is_kept_for_a_later_one():
    play = Play(CacheTtl(500.0), kv_tokens=2 * RESERVED_TOKENS + 2048)
    play.submit("a")
    play.submit("b")
    play.submit("c")
    play.end_turn("a/0", 16)
    play.end_turn("b/0", 2000)
    assert play.submit("d") == {}
    assert set(play.answer("a/0", 1000)) == {"a/0", "d/0"}  # b's KV is kept no more


def test_a_response_that_is_over_in_its_tool_leaves_its_room():
    play = Play(CacheTtl(500.0), kv_tokens=2 * RESERVED_TOKENS + 1024)
    play.submit("a")
    play.submit("b")
    play.end_turn("a/0", 1000)
    assert play.submit("c") == {}
    assert play.answer("a/0", 0, done=True) == {"c/0": "i0"}


def test_new_programs_wait_while_active_ones_fill_the_kv_and_a_tool_is_no_gap():
    play = Play(ProgramPause(), kv_tokens=2 * RESERVED_TOKENS + 64)
    assert set(play.submit("a", n=3)) == {"a/0", "a/1"}
    assert play.end_turn("a/0", 256) == {}
    assert play.end_turn("a/1", 256) == {}  # nothing runs, and yet both are active


def test_the_shortest_program_that_does_not_run_is_paused_where_kv_is_short():
    play = Play(ProgramPause(), kv_tokens=1056)
    play.submit("a", n=3)
    play.end_turn("a/0", 300)
    play.end_turn("a/1", 100)
    assert play.answer("a/0", 100) == {"a/0": "i0"}  # 672 tokens, a/2 may need 272, and a/1 has 116
    assert play.answer("a/1", 4) == {}  # paused: it would need 384
    assert play.end_turn("a/2", 9) == {}
    assert play.answer("a/2", 0, done=True) == {"a/1": "i0"}


def test_the_program_that_is_sent_is_not_paused_though_it_is_the_shortest():
    policy = ProgramPause()
    play = Play(policy, kv_tokens=1056)
    play.submit("a", n=2)
    play.end_turn("a/0", 700)
    play.end_turn("a/1", 100)
    assert play.answer("a/1", 4) == {"a/1": "i0"}  # it may need 376 beside the 716 of the other
    assert [request.id for request, _ in policy._active["i0"].values()] == ["a/1"]


def test_a_paused_program_comes_before_new_ones():
    play = Play(ProgramPause(), kv_tokens=1056)
    play.submit("a", n=3)
    play.submit("b", prompt=128)
    play.end_turn("a/0", 300)
    play.end_turn("a/1", 100)
    play.answer("a/0", 100)
    play.answer("a/1", 4)
    play.end_turn("a/2", 9)
    assert play.answer("a/2", 0, done=True) == {"a/1": "i0"}


def test_a_response_moves_between_turns_and_not_within_one():
    play = Play(MigrateInTools(), instances=2, prioritizer=False)
    assert play.submit("a") == {"a/0": "i0"}
    assert play.handle(ChunkFinished("a/0", "i0", 9, False)) == {"a/0": "i0"}
    assert play.submit("b", n=3) == {"b/0": "i1", "b/1": "i1", "b/2": "i0"}
    play.end_turn("a/0")
    assert play.handle(ChunkFinished("b/0", "i1", 9, False)) == {"b/0": "i1"}
    play.end_turn("b/1")
    assert play.answer("b/1") == {"b/1": "i0"}
    assert play.answer("a/0") == {"a/0": "i1"}
