"""Random rollouts under every combination of the real plug-ins; the rig checks after every event."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from seer_baselines.group_round_robin import GroupRoundRobin
from seer_baselines.oracle_longest_first import OracleLongestFirst
from seer_context_sched import ContextAware
from seer_divided_rollout import Chunks, KvAware

from seer_core.defaults import FirstComeFirstServed, LeastLoaded, WholeRequests
from seer_core.events import GroupSpec, InstanceReported
from seer_core.scheduler import Policies, Scheduler, Slot

PROMPT, TOKENS = 20, 60
SMALLEST_KV = 96  # a prompt and response in whole blocks of 16 always fit

splitters = st.sampled_from([WholeRequests, lambda: Chunks(7), lambda: Chunks(32)])
prioritizers = st.sampled_from(
    [FirstComeFirstServed, OracleLongestFirst]
    + [lambda guard=guard: ContextAware(guard) for guard in (0, 1, 2, 5)]
)
placers = st.sampled_from(
    [LeastLoaded, GroupRoundRobin, lambda: KvAware(32, 0.25, 0.75)]
    + [lambda stay=stay: KvAware(32, stay) for stay in (0.0, 0.25, 1.0)]
)
groups = st.tuples(
    st.integers(1, PROMPT),
    st.integers(1, TOKENS),
    st.lists(st.integers(1, TOKENS), min_size=1, max_size=4).map(tuple),
)


def test_random_rollouts_lose_nothing_and_balance_their_accounts(make_rig):
    class Rollouts(RuleBasedStateMachine):
        @initialize(
            splitter=splitters, prioritizer=prioritizers, placer=placers, max_failures=st.integers(0, 2)
        )
        def begin(self, splitter, prioritizer, placer, max_failures):
            def fill():
                return Policies(
                    Slot("splitter", "test", splitter()),
                    Slot("prioritizer", "test", prioritizer()),
                    Slot("placer", "test", placer()),
                )

            self.rig = make_rig(fill(), max_failures)
            self.twin = Scheduler(fill(), max_failures)
            self.decide, self.rig.scheduler.handle = self.rig.scheduler.handle, self.handle
            self.names = 0

        def handle(self, event, now):
            """Stand in for the scheduler's own method: its twin has to decide the same."""
            commands = self.decide(event, now)
            assert commands == self.twin.handle(event, now)
            self.check_limits()
            return commands

        def check_limits(self):
            scheduler = self.rig.scheduler
            placer = scheduler.policies.placer.strategy
            living = scheduler.instances.values()
            if isinstance(placer, KvAware):
                assert all(
                    0 <= status.reserved_kv_tokens <= status.info.kv_capacity_tokens for status in living
                )
            if not isinstance(placer, GroupRoundRobin):
                assert all(0 <= status.running <= status.info.max_running for status in living)
            if isinstance(placer, LeastLoaded) and scheduler.waiting:
                assert all(status.free_slots == 0 for status in living)
            if isinstance(placer, GroupRoundRobin) and living:
                assert scheduler.waiting == 0

        def name(self):
            self.names += 1
            return f"n{self.names}"

        @rule(drawn=st.lists(groups, min_size=1, max_size=3))
        def submit(self, drawn):
            self.rig.submit(
                *(
                    GroupSpec(self.name(), prompt, len(lengths), max_tokens, lengths)
                    for prompt, max_tokens, lengths in drawn
                )
            )

        @precondition(lambda self: len(self.rig.instances) < 4)
        @rule(
            blocks=st.integers(SMALLEST_KV // 16, 20),
            block=st.sampled_from([1, 4, 16]),
            slots=st.integers(1, 4),
        )
        def start(self, blocks, block, slots):
            self.rig.start(self.name(), blocks * 16, block, slots)

        @precondition(lambda self: self.rig.instances)
        @rule(data=st.data(), back=st.booleans())
        def lose(self, data, back):
            name = data.draw(st.sampled_from(sorted(self.rig.instances)))
            info = self.rig.instances[name]
            self.rig.lose(name)
            if back:
                self.rig.start(name, info.kv_capacity_tokens, info.block_tokens, info.max_running)

        @precondition(lambda self: self.rig.flights)
        @rule(data=st.data(), stopped=st.booleans())
        def finish(self, data, stopped):
            request_id = data.draw(st.sampled_from(sorted(self.rig.flights)))
            most = self.rig.flights[request_id].max_tokens
            self.rig.finish(request_id, data.draw(st.integers(0 if stopped else 1, most)), stopped)

        @precondition(lambda self: self.rig.flights)
        @rule(data=st.data())
        def finish_many_chunks(self, data):
            for request_id in data.draw(st.permutations(sorted(self.rig.flights))):
                if request_id in self.rig.flights:
                    self.rig.finish(request_id)

        @precondition(lambda self: self.rig.flights)
        @rule(data=st.data())
        def fail(self, data):
            self.rig.fail(data.draw(st.sampled_from(sorted(self.rig.flights))))

        @precondition(lambda self: self.rig.generated)
        @rule(data=st.data())
        def abort(self, data):
            self.rig.abort(data.draw(st.sampled_from(sorted(self.rig.generated))))

        @precondition(lambda self: self.rig.instances)
        @rule(data=st.data(), usage=st.floats(0, 1))
        def report(self, data, usage):
            name = data.draw(st.sampled_from(sorted(self.rig.instances)))
            assert self.rig.handle(InstanceReported(name, 1, 0, usage)) == []

        def teardown(self):
            """Whatever has happened, every request comes to one end."""
            if not hasattr(self, "rig") or self.rig.broken:
                return
            if not self.rig.instances:
                self.rig.start(self.name(), SMALLEST_KV, 16, 2)
            self.rig.finish_all()
            assert set(self.rig.completed) == set(self.rig.generated)
            for status in self.rig.scheduler.instances.values():
                assert (status.running, status.reserved_kv_tokens) == (0, 0)
            assert len(self.rig.scheduler.buffer) == len(self.rig.scheduler.contexts) == 0

    run_state_machine_as_test(
        Rollouts,
        settings=settings(
            max_examples=100,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
