"""Chunks on one instance, and cohorts of those that decode: each step gives all the same number of tokens.

Between two events nothing of them needs to be touched.  The cohort's clock counts the tokens that it
has given, its ticks: a run that ends at tick ``end`` with ``total`` tokens has ``total - (end - now)``
tokens now, and takes a new KV block at each tick that comes to its phase (modulo the block's tokens).
Counts per phase and a heap of ends give the effect of any number of like steps.

With drafts a step gives ``rate`` tokens in expectation.  The clock keeps the fraction, so a step gives
the number of whole ticks that it completes: now one, now two, and exactly the rate in the long run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate, dropwhile
from operator import not_, sub

import msgspec

from seer_core.ports.engine import ChunkJob
from seer_sim.kv import Prompt

__all__ = ["TOKEN_UNIT", "DecodeCohort", "SimChunk"]

TOKEN_UNIT_BITS = 32
TOKEN_UNIT = 1 << TOKEN_UNIT_BITS
"""One token in the unit of the clock; whole numbers, so that no order of adding shows."""


class SimChunk:
    """A chunk that waits, computes its context (``cohort`` is None) or decodes in a ``DecodeCohort``.

    ``tokens`` and ``computed`` stand still while it decodes.  ``fills`` counts the steps that finished its
    context and gave a token, ``verified[g]`` the decoding steps with g draft tokens.  ``fetched_blocks``
    were brought from the KV pool, which was ``sought`` for them, and ``pool_tokens`` found there alone.
    ``response_tokens`` is how long the response will be.  Its KV is kept as ``kv_name``.
    """

    __slots__ = (
        "cached",
        "cohort",
        "computed",
        "end",
        "fetched_blocks",
        "fills",
        "final_tokens",
        "job",
        "joined",
        "kv_name",
        "new_tokens",
        "offset",
        "phase",
        "pool_tokens",
        "preemptions",
        "prompt",
        "response_tokens",
        "sought",
        "stopped",
        "tokens",
        "verified",
        "verified_before",
        "work",
    )

    def __init__(
        self, job: ChunkJob, tokens: int, new_tokens: int, stopped: bool, response_tokens: int = 0
    ) -> None:
        self.job = job
        self.kv_name = job.trajectory or job.request_id
        self.new_tokens = new_tokens
        self.stopped = stopped
        self.response_tokens = response_tokens or tokens - job.context_tokens + new_tokens
        self.tokens = tokens
        self.final_tokens = tokens + new_tokens
        self.prompt: Prompt = ("", 0)
        self.computed = 0
        self.cached = 0
        self.sought = False
        self.fetched_blocks = 0
        self.pool_tokens = 0
        self.work = 0
        self.preemptions = 0
        self.fills = 0
        self.verified: list[int] = []
        # Its cohort's, while it is in one.
        self.cohort: DecodeCohort | None = None
        self.joined = 0
        self.end = 0
        self.phase = 0
        self.offset = 0
        self.verified_before: list[int] = []

    def end_early(self) -> None:
        """End the chunk with the tokens that it has."""
        self.new_tokens -= self.final_tokens - self.tokens
        self.final_tokens = self.tokens
        self.stopped = False
        self.job = msgspec.structs.replace(self.job, last=False)

    @property
    def middle(self) -> int:
        """Tokens of the response that are written in the middle of the chunk."""
        return self.final_tokens - self.new_tokens // 2 - self.job.context_tokens

    @property
    def steps(self) -> int:
        """Steps that have given it a token."""
        return self.fills + sum(self.verified)

    @property
    def drafted_at(self) -> list[int]:
        """Steps that have verified at least 1, 2, ... draft tokens for it."""
        at_least = dropwhile(not_, accumulate(reversed(self.verified[1:])))
        return [*at_least][::-1]


class DecodeCohort:
    """Runs of one class: probes or not, and accepted at ``rates``.

    ``rates[j]`` is the probability that a draft is accepted up to position j + 1; without any, the class
    never drafts.  With drafts of g tokens a step computes ``positions_at[g]`` positions for each run, and a
    share of ``bare`` of a run's steps verifies nothing for it.
    ``context`` counts the positions computed of all runs, in units of ``1 / ONE``, and in expectation.
    """

    def __init__(
        self,
        block: int,
        rates: Sequence[float] = (),
        probe: bool = False,
        positions_at: Sequence[float] = (1,),
        bare: float = 0.0,
        row: int = 0,
    ) -> None:
        self.probe = probe
        self.row = row
        self.bare = bare
        self.rates = rates
        self.size = 0
        self.context = 0
        self.draft_tokens = 0
        self.positions = positions_at[0]
        self.rate = TOKEN_UNIT
        self.verified = [0] * (len(rates) + 1)
        self._positions_at = positions_at
        self._rates = [
            TOKEN_UNIT + round(sum(rates[:tokens]) * TOKEN_UNIT) for tokens in range(len(rates) + 1)
        ]
        self._block = block
        self._clock = 0
        self._growing = [0] * block
        self._ends: list[tuple[int, int, SimChunk]] = []

    def draft(self, tokens: int) -> None:
        """Verify so many tokens of each draft per run from the next step on, or as many as ``rates`` has."""
        self.draft_tokens = min(tokens, len(self.rates))
        self.positions = self._positions_at[self.draft_tokens]
        self.rate = self._rates[self.draft_tokens]

    def verify(self, verified: float, accepted: float) -> None:
        """Verify so many tokens per run and step from the next step on, and accept so many, on average."""
        self.draft_tokens = len(self.rates) if verified else 0
        self.positions = 1 + verified
        self.rate = TOKEN_UNIT + round(accepted * TOKEN_UNIT)

    def join(self, run: SimChunk, number: int) -> None:
        """Take in a run whose context is computed and whose next token is out; ``number`` rises."""
        ticks = self._clock >> TOKEN_UNIT_BITS
        run.cohort = self
        run.joined = number
        run.end = ticks + run.final_tokens - run.tokens
        run.phase = (run.end - run.final_tokens + 1) % self._block
        run.offset = run.computed * TOKEN_UNIT - self._clock
        run.verified_before = self.verified.copy()
        if run.verified:  # it was preempted
            run.verified_before = [*map(sub, self.verified, run.verified)]
        self.size += 1
        self.context += run.computed * TOKEN_UNIT
        self._growing[run.phase] += 1
        heappush(self._ends, (run.end, number, run))

    def leave(self, run: SimChunk) -> None:
        """Let a run go, at its end or before, and write down how far it came."""
        tokens = run.final_tokens - max(0, run.end - (self._clock >> TOKEN_UNIT_BITS))
        run.work += tokens - run.tokens
        run.tokens = tokens
        run.computed = tokens - 1
        run.verified = [*map(sub, self.verified, run.verified_before)]
        run.cohort = None
        self.size -= 1
        self.context -= run.offset + self._clock
        self._growing[run.phase] -= 1

    def move(self, steps: int) -> None:
        """Make ``steps`` steps."""
        moved = self.rate * steps
        self._clock += moved
        self.context += self.size * moved
        self.verified[self.draft_tokens] += steps

    def ended(self) -> list[SimChunk]:
        """Return the runs that have all their tokens, once; they have yet to leave."""
        ends = self._ends
        ended: list[SimChunk] = []
        ticks = self._clock >> TOKEN_UNIT_BITS
        while ends and ends[0][0] <= ticks:
            _, number, run = heappop(ends)
            if run.cohort is self and run.joined == number:
                ended.append(run)
        return ended

    def steps_to_end(self) -> int:
        """Return the number of steps until the first run ends; there must be one."""
        return -((self._clock - self._first_end() * TOKEN_UNIT) // self.rate)

    def growth(self, steps: int, since: int = 0) -> int:
        """Return the blocks that ``steps`` steps take, without those of the first ``since`` steps.

        No run may end before the last step.
        """
        growing, block = self._growing, self._block
        first = self._clock + self.rate * since >> TOKEN_UNIT_BITS
        last = self._clock + self.rate * steps >> TOKEN_UNIT_BITS
        ticks = last - first
        start = first % block
        if ticks <= 1:
            return growing[start] if ticks else 0
        blocks = 0
        if ticks >= block:
            rounds, ticks = divmod(ticks, block)
            blocks = rounds * self.size
        end = start + ticks
        blocks += sum(growing[start:end])
        if end > block:
            blocks += sum(growing[: end - block])
        if self.rate != TOKEN_UNIT and self._ends and self._ends[0][0] < last:
            # A run may end in the midst of its last step's tokens.
            blocks -= sum(
                (last - 1 - run.phase) // self._block - (end - 1 - run.phase) // self._block
                for end, number, run in self._ends_before(last)
                if run.cohort is self and run.joined == number
            )
        return blocks

    def _ends_before(self, tick: int) -> Iterator[tuple[int, int, SimChunk]]:
        """Yield the heap's entries whose end is earlier, and look at little else of it."""
        ends = self._ends
        places = [0]
        while places:
            place = places.pop()
            if place < len(ends) and ends[place][0] < tick:
                yield ends[place]
                places += (2 * place + 1, 2 * place + 2)

    def _first_end(self) -> int:
        """Return the tick at which the first run ends; forget those that left before theirs."""
        while True:
            end, number, run = self._ends[0]
            if run.cohort is self and run.joined == number:
                return end
            heappop(self._ends)
