"""Random rollouts under every combination of the real plug-ins; the rig checks after every event."""

from __future__ import annotations

import hypothesis.strategies as st
from seer_baselines.group_round_robin import GroupRoundRobin
from seer_baselines.oracle_longest_first import OracleLongestFirst
from seer_context_sched import ContextAware
from seer_divided_rollout import Chunks, KvAware
from seer_testing.rollouts import roll_out_at_random

from seer_core.scheduling.defaults import FirstComeFirstServed, LeastLoaded, WholeRequests
from seer_core.scheduling.scheduler import Policies, Slot

splitters = st.sampled_from([WholeRequests, lambda: Chunks(7), lambda: Chunks(32)])
prioritizers = st.sampled_from([FirstComeFirstServed, OracleLongestFirst, ContextAware])
placers = st.sampled_from(
    [LeastLoaded, GroupRoundRobin, lambda: KvAware(0.25, 0.75)]
    + [lambda stay=stay: KvAware(stay) for stay in (0.0, 0.25, 1.0)]
)


def filler(splitter, prioritizer, placer):
    return lambda: Policies(
        Slot("splitter", "test", splitter()),
        Slot("prioritizer", "test", prioritizer()),
        Slot("placer", "test", placer()),
    )


def check_limits(rig):
    scheduler = rig.scheduler
    placer = scheduler.policies.placer.strategy
    placer = getattr(placer, "strategy", placer)  # without the guard of debug
    living = scheduler.instances.values()
    if isinstance(placer, KvAware):
        assert all(0 <= status.reserved_kv_tokens <= status.info.kv_capacity_tokens for status in living)
    if not isinstance(placer, GroupRoundRobin):
        assert all(0 <= status.running <= status.info.max_running for status in living)
    if isinstance(placer, LeastLoaded) and scheduler.waiting and not scheduler.paused:
        assert all(status.free_slots == 0 for status in living)
    if isinstance(placer, GroupRoundRobin) and living and not scheduler.paused:
        assert scheduler.waiting == 0


def test_random_rollouts_lose_nothing_and_balance_their_accounts():
    roll_out_at_random(st.builds(filler, splitters, prioritizers, placers), check_limits)
