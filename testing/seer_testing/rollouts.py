"""Random rollouts: in any order of events, no request is lost, and none waits for ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Literal

import hypothesis.strategies as st
import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from seer_core.model import Request
from seer_core.model.events import GroupSpec, InstanceReported, ResumedResponse
from seer_core.model.requests import FinishReason
from seer_core.scheduling.scheduler import STARVATION_INTERVAL, Policies
from seer_testing.harness import DeterminismHarness, SchedulerHarness
from seer_testing.support import is_exploring

__all__ = ["PIECE", "FixedSplitter", "outlast_arrivals", "quiet", "roll_out_at_random"]

PROMPT, TOKENS = 20, 60
SMALLEST_KV = 96
"""KV tokens of the smallest instance: a prompt and a response fit, in whole blocks of 16."""

GROUPS = st.tuples(
    st.integers(1, PROMPT),
    st.integers(1, TOKENS),
    st.lists(st.integers(1, TOKENS), min_size=1, max_size=4).map(tuple),
)


Ending = FinishReason | Literal["acting"] | None
"""Why a response is over, or that its environment works on its turn; None if neither."""


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


RESUMED = st.lists(
    st.tuples(
        st.integers(0, TOKENS - 1), st.sampled_from([None, None, "stop", "length", "aborted", "acting"])
    ),
    min_size=4,
    max_size=4,
)
"""What an earlier process left of each response of a group: tokens, and why it is over, or that it acts."""


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


class _Unchecked(SchedulerHarness):
    """A scheduler by hand for many groups, over which a comparison after every event takes too long."""

    def check(self) -> None:
        return


def _outlast(policies: Policies, first: Sequence[Drawn], others: Sequence[Drawn], slots: int) -> None:
    rig = _Unchecked(policies)
    numbers = count()
    rig.start("a", 16 * 20, 16, slots)
    rig.submit(*(_group(f"n{next(numbers)}", drawn) for drawn in first))
    waiting = set(rig.generated)
    needed = sum(-(-_length(rig, request_id) // PIECE) for request_id in waiting)
    for finished in count():
        if waiting <= rig.completed.keys():
            return
        sent = finished + len(rig.in_flight)
        assert sent <= STARVATION_INTERVAL * (needed + 1), (
            f"{len(waiting - rig.completed.keys())} still wait after {sent} chunks, of others"
        )
        rig.submit(_group(f"n{next(numbers)}", others[finished % len(others)]))
        assert rig.in_flight, "nothing runs, and requests wait"
        request_id, chunk = next(iter(rig.in_flight.items()))
        left = _length(rig, request_id) - rig.generated[request_id]
        rig.finish(request_id, min(chunk.max_tokens, left), left <= chunk.max_tokens)


def _group(name: str, drawn: Drawn) -> GroupSpec:
    prompt, max_tokens, lengths = drawn
    return GroupSpec(name, prompt, len(lengths), max_tokens, lengths)


def _resumed(group: GroupSpec, drawn: Sequence[tuple[int, Ending]]) -> GroupSpec:
    """Return a group as an earlier process left it; it has an environment if a response acts."""
    responses = [
        ResumedResponse(
            group.max_tokens if reason == "length" else tokens % group.max_tokens,
            None if reason == "acting" else reason,
            acting=reason == "acting",
        )
        for tokens, reason in drawn[: group.n]
    ]
    turns = any(each.acting for each in responses)
    return msgspec.structs.replace(group, resumed=tuple(responses), turns=turns)


def _length(rig: SchedulerHarness, request_id: str) -> int:
    """Return the true length of a request, in tokens."""
    name, _, index = request_id.rpartition("/")
    group = rig.groups[name]
    assert group.known_lengths is not None
    return min(group.known_lengths[int(index)], group.max_tokens)


def roll_out_at_random(
    policies: st.SearchStrategy[Callable[[], Policies]],
    check: Callable[[SchedulerHarness], None] = lambda rig: None,
    examples: int = 100,
) -> None:
    """Submit, lose, drain, pause, finish, fail and abort at random; then finish everything.

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

        @rule(drawn=st.lists(GROUPS, min_size=1, max_size=3), turns=st.booleans())
        def submit(self, drawn: list[Drawn], turns: bool) -> None:
            groups = [_group(self.name(), each) for each in drawn]
            self.rig.submit(*(msgspec.structs.replace(group, turns=turns) for group in groups))

        @rule(drawn=st.lists(st.tuples(GROUPS, RESUMED), min_size=1, max_size=3))
        def resume(self, drawn: list[tuple[Drawn, list[tuple[int, Ending]]]]) -> None:
            self.rig.submit(*(_resumed(_group(self.name(), each), left) for each, left in drawn))

        @invariant()
        def checked(self) -> None:
            if hasattr(self, "rig"):  # a rule may have failed before it was made
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

        @precondition(lambda self: self.rig.instances)
        @rule(data=st.data(), back=st.booleans())
        def lose(self, data: st.DataObject, back: bool) -> None:
            name = data.draw(st.sampled_from(sorted(self.rig.instances)))
            info = self.rig.instances[name]
            self.rig.lose(name)
            if back:
                self.rig.start(
                    name, info.kv_capacity_tokens, info.block_tokens, info.max_running, info.shares_prompts
                )

        @precondition(lambda self: self.rig.instances)
        @rule(data=st.data())
        def leave(self, data: st.DataObject) -> None:
            self.rig.leave(data.draw(st.sampled_from(sorted(self.rig.instances))))

        @precondition(lambda self: self.rig.leaving)
        @rule(data=st.data())
        def stop(self, data: st.DataObject) -> None:
            self.rig.stop(data.draw(st.sampled_from(sorted(self.rig.leaving))))

        @rule(paused=st.booleans())
        def pause_or_go_on(self, paused: bool) -> None:
            if paused:
                self.rig.pause()
            else:
                self.rig.resume()

        @precondition(lambda self: self.rig.in_flight)
        @rule(data=st.data(), stopped=st.booleans())
        def finish(self, data: st.DataObject, stopped: bool) -> None:
            request_id = data.draw(st.sampled_from(sorted(self.rig.in_flight)))
            most = self.rig.in_flight[request_id].max_tokens
            self.rig.finish(request_id, data.draw(st.integers(0 if stopped else 1, most)), stopped)

        @precondition(lambda self: self.rig.in_flight)
        @rule(data=st.data())
        def finish_many_chunks(self, data: st.DataObject) -> None:
            for request_id in data.draw(st.permutations(sorted(self.rig.in_flight))):
                if request_id in self.rig.in_flight:
                    self.rig.finish(request_id)

        @precondition(lambda self: self.rig.in_flight)
        @rule(data=st.data())
        def fail(self, data: st.DataObject) -> None:
            self.rig.fail(data.draw(st.sampled_from(sorted(self.rig.in_flight))))

        @precondition(lambda self: self.rig.acting)
        @rule(data=st.data(), done=st.booleans())
        def answer(self, data: st.DataObject, done: bool) -> None:
            request_id = data.draw(st.sampled_from(sorted(self.rig.acting)))
            group = self.rig.groups[request_id.rpartition("/")[0]]
            left = group.max_tokens - self.rig.generated[request_id]
            self.rig.answer(request_id, data.draw(st.integers(0, left)), done)

        @precondition(lambda self: self.rig.acting)
        @rule(data=st.data())
        def fail_environment(self, data: st.DataObject) -> None:
            self.rig.fail_environment(data.draw(st.sampled_from(sorted(self.rig.acting))))

        @precondition(lambda self: self.rig.generated)
        @rule(data=st.data())
        def abort(self, data: st.DataObject) -> None:
            self.rig.abort(data.draw(st.sampled_from(sorted(self.rig.generated))))

        @precondition(lambda self: self.rig.instances)
        @rule(data=st.data(), usage=st.floats(0, 1))
        def report(self, data: st.DataObject, usage: float) -> None:
            name = data.draw(st.sampled_from(sorted(self.rig.instances)))
            self.rig.handle(InstanceReported(name, 1, 0, usage))

        def teardown(self) -> None:
            """Check that every request has ended once."""
            if not hasattr(self, "rig") or self.rig.broken:
                return
            self.rig.resume()
            for name in sorted(self.rig.leaving):
                self.rig.stop(name)
            if not self.rig.instances:
                self.rig.start(self.name(), SMALLEST_KV, 16, 2)
            self.rig.finish_all()
            for request_id in sorted(self.rig.acting):
                self.rig.answer(request_id, 0, done=True)
            assert set(self.rig.completed) == set(self.rig.generated)
            for status in self.rig.scheduler.instances.values():
                assert (status.running, status.reserved_kv_tokens) == (0, 0)
            assert len(self.rig.scheduler.buffer) == len(self.rig.scheduler.contexts) == 0

    run_state_machine_as_test(Rollouts, settings=quiet(examples, stateful_step_count=30))
