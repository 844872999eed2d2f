"""Random rollouts: in any order of events, no request is lost, and none waits for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from seer_core.model import InstanceInfo, Request
from seer_core.model.events import (
    ChunkFinished,
    Dispatch,
    Event,
    GroupSpec,
    GroupsSubmitted,
    InstanceReported,
    InstanceStarted,
)
from seer_core.scheduling.scheduler import STARVATION_INTERVAL, Policies, Scheduler
from seer_core.testing.harness import DeterminismHarness, SchedulerHarness
from seer_core.testing.support import is_exploring

__all__ = ["MOST_TOKENS", "PIECE", "FixedSplitter", "outlast_arrivals", "quiet", "roll_out_at_random"]

PROMPT, TOKENS = 20, 60
SMALLEST_KV = 96
"""KV tokens of the smallest instance: a prompt and a response fit, in whole blocks of 16."""

MOST_TOKENS = TOKENS
"""No response is longer, so no chunk is."""

GROUPS = st.tuples(
    st.integers(1, PROMPT),
    st.integers(1, TOKENS),
    st.lists(st.integers(1, TOKENS), min_size=1, max_size=4).map(tuple),
)


def quiet(examples: int, **more: Any) -> settings:
    """Return settings of Hypothesis: no deadline, and the same draws in each run that does not explore."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=not is_exploring(),
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        **more,
    )


class FixedSplitter:
    """Splitter into chunks of one size."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def split(self, request: Request) -> int:
        """Return that size, or what is left."""
        return min(self.tokens, request.remaining_tokens)


PIECE = 20
"""Tokens of a chunk, where groups have to outlast others that arrive."""

Drawn = tuple[int, int, tuple[int, ...]]
"""Prompt tokens, limit and lengths of a group."""


def outlast_arrivals(policies: Callable[[], Policies], examples: int = 25) -> None:
    """Check that some groups come to their end within a bound, while others arrive after each chunk.

    The bound is the scheduler's: ``STARVATION_INTERVAL`` times the chunks that the first ones need, which
    are taken to have ``PIECE`` tokens at least.
    """

    @quiet(examples)
    @given(
        first=st.lists(GROUPS, min_size=1, max_size=3),
        others=st.lists(GROUPS, min_size=1, max_size=3),
        slots=st.integers(1, 4),
    )
    def outlast(first: list[Drawn], others: list[Drawn], slots: int) -> None:
        _outlast(policies(), first, others, slots)

    outlast()


def _outlast(policies: Policies, first: Sequence[Drawn], others: Sequence[Drawn], slots: int) -> None:
    scheduler = Scheduler(policies, debug=True)
    generated: dict[str, int] = {}
    lengths: dict[str, int] = {}
    in_flight: deque[Dispatch] = deque()
    names, times = count(), count()
    sent = 0

    def send(event: Event) -> None:
        nonlocal sent
        for command in scheduler.handle(event, float(next(times))):
            if isinstance(command, Dispatch):
                in_flight.append(command)
                sent += 1

    def submit(groups: Sequence[Drawn]) -> None:
        specs = [GroupSpec(f"n{next(names)}", prompt, len(each), most, each) for prompt, most, each in groups]
        for spec in specs:
            for index, length in enumerate(spec.known_lengths or ()):
                generated[f"{spec.id}/{index}"] = 0
                lengths[f"{spec.id}/{index}"] = min(length, spec.max_tokens)
        send(GroupsSubmitted(tuple(specs)))

    send(InstanceStarted(InstanceInfo("a", 16 * 20, 16, slots, 16 * 20)))
    submit(first)
    needed = sum(-(-tokens // PIECE) for tokens in lengths.values())
    waiting = set(lengths)
    for number in count():
        if not waiting:
            return
        assert sent <= STARVATION_INTERVAL * (needed + 1), (
            f"{len(waiting)} still wait after {sent} chunks, of others"
        )
        submit([others[number % len(others)]])
        assert in_flight, "nothing runs, and requests wait"
        chunk = in_flight.popleft()
        name = chunk.request_id
        tokens = min(chunk.max_tokens, lengths[name] - generated[name])
        generated[name] += tokens
        over = generated[name] == lengths[name]
        if over:
            waiting.discard(name)
        send(ChunkFinished(name, chunk.instance_id, tokens, over))


def roll_out_at_random(
    policies: st.SearchStrategy[Callable[[], Policies]],
    check: Callable[[SchedulerHarness], None] = lambda rig: None,
    examples: int = 100,
) -> None:
    """Submit, lose, finish, fail and abort at random under policies that are drawn; then finish everything.

    Each draw of ``policies`` makes equal ones whenever it is called: two schedulers have to decide alike.
    ``check`` is called after each event.  No request needs more than 80 tokens of KV, every instance has 96.
    """

    class Rollouts(RuleBasedStateMachine):
        @initialize(make=policies, max_failures=st.integers(0, 2))
        def begin(self, make: Callable[[], Policies], max_failures: int) -> None:
            self.rig = DeterminismHarness(make, max_failures)
            self.names = 0

        def name(self) -> str:
            self.names += 1
            return f"n{self.names}"

        @rule(drawn=st.lists(GROUPS, min_size=1, max_size=3))
        def submit(self, drawn: list[tuple[int, int, tuple[int, ...]]]) -> None:
            self.rig.submit(
                *(
                    GroupSpec(self.name(), prompt, len(lengths), max_tokens, lengths)
                    for prompt, max_tokens, lengths in drawn
                )
            )
            check(self.rig)

        @precondition(lambda self: len(self.rig.instances) < 4)
        @rule(
            blocks=st.integers(SMALLEST_KV // 16, 20),
            block=st.sampled_from([1, 4, 16]),
            slots=st.integers(1, 4),
            shares_prompts=st.booleans(),
        )
        def start(self, blocks: int, block: int, slots: int, shares_prompts: bool) -> None:
            self.rig.start(self.name(), blocks * 16, block, slots, shares_prompts)
            check(self.rig)

        @precondition(lambda self: self.rig.instances)
        @rule(data=st.data(), back=st.booleans())
        def lose(self, data: st.DataObject, back: bool) -> None:
            name = data.draw(st.sampled_from(sorted(self.rig.instances)))
            info = self.rig.instances[name]
            self.rig.lose(name)
            check(self.rig)
            if back:
                self.rig.start(
                    name, info.kv_capacity_tokens, info.block_tokens, info.max_running, info.shares_prompts
                )
                check(self.rig)

        @precondition(lambda self: self.rig.in_flight)
        @rule(data=st.data(), stopped=st.booleans())
        def finish(self, data: st.DataObject, stopped: bool) -> None:
            request_id = data.draw(st.sampled_from(sorted(self.rig.in_flight)))
            most = self.rig.in_flight[request_id].max_tokens
            self.rig.finish(request_id, data.draw(st.integers(0 if stopped else 1, most)), stopped)
            check(self.rig)

        @precondition(lambda self: self.rig.in_flight)
        @rule(data=st.data())
        def finish_many_chunks(self, data: st.DataObject) -> None:
            for request_id in data.draw(st.permutations(sorted(self.rig.in_flight))):
                if request_id in self.rig.in_flight:
                    self.rig.finish(request_id)
                    check(self.rig)

        @precondition(lambda self: self.rig.in_flight)
        @rule(data=st.data())
        def fail(self, data: st.DataObject) -> None:
            self.rig.fail(data.draw(st.sampled_from(sorted(self.rig.in_flight))))
            check(self.rig)

        @precondition(lambda self: self.rig.generated)
        @rule(data=st.data())
        def abort(self, data: st.DataObject) -> None:
            self.rig.abort(data.draw(st.sampled_from(sorted(self.rig.generated))))
            check(self.rig)

        @precondition(lambda self: self.rig.instances)
        @rule(data=st.data(), usage=st.floats(0, 1))
        def report(self, data: st.DataObject, usage: float) -> None:
            name = data.draw(st.sampled_from(sorted(self.rig.instances)))
            self.rig.handle(InstanceReported(name, 1, 0, usage))
            check(self.rig)

        def teardown(self) -> None:
            """Check that every request has ended once."""
            if not hasattr(self, "rig") or self.rig.broken:
                return
            if not self.rig.instances:
                self.rig.start(self.name(), SMALLEST_KV, 16, 2)
            self.rig.finish_all()
            assert set(self.rig.completed) == set(self.rig.generated)
            for status in self.rig.scheduler.instances.values():
                assert (status.running, status.reserved_kv_tokens) == (0, 0)
            assert len(self.rig.scheduler.buffer) == len(self.rig.scheduler.contexts) == 0

    run_state_machine_as_test(Rollouts, settings=quiet(examples, stateful_step_count=30))
