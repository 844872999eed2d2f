"""Continuous batching as vLLM does it, many steps at a time.

A step gives every running request one token (or computes a piece of its prompt).  All decoding
requests move in lockstep, so between two events nothing needs to be touched: with ``done`` steps
behind, a request that ends at step ``end`` with ``total`` tokens has ``total - (end - done)`` now,
and takes a new KV block when ``done`` comes to its phase (a number modulo the block's tokens).
Counts per phase and a heap of ends say how many like steps follow.

The rules are those of vLLM 0.32's V1 scheduler, first come first served: running requests first; the
newest is preempted when a block is missing, and recomputed; waiting ones are admitted in order while
their whole sequence fits; prompts share the step's token budget.
Simplified: a prompt's blocks are all taken at its admission, not piece by piece.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from seer_core.model import InstanceInfo
from seer_core.ports import ChunkJob
from seer_sim.kv import BlockPool

__all__ = ["Batch", "Run", "Segment"]


class Run:
    """One chunk on one instance.  ``end`` is the step it ends at while it decodes, else None."""

    __slots__ = (
        "cached",
        "computed",
        "end",
        "final_tokens",
        "job",
        "new_tokens",
        "phase",
        "preemptions",
        "prompt_blocks",
        "stopped",
        "tokens",
        "work",
    )

    def __init__(self, job: ChunkJob, new_tokens: int, stopped: bool) -> None:
        self.job = job
        self.new_tokens = new_tokens
        self.stopped = stopped
        self.tokens = len(job.token_ids)
        self.final_tokens = self.tokens + new_tokens
        self.prompt_blocks = 0
        self.computed = 0
        self.cached = 0
        self.work = 0
        self.preemptions = 0
        self.end: int | None = None
        self.phase = 0


class Segment:
    """Up to ``steps`` like steps: positions computed in each, KV read in the first, KV growth."""

    __slots__ = ("context_tokens", "growth_tokens", "steps", "tokens")

    def __init__(self, tokens: int, context_tokens: int, growth_tokens: int, steps: int) -> None:
        self.tokens = tokens
        self.context_tokens = context_tokens
        self.growth_tokens = growth_tokens
        self.steps = steps


class Batch:
    """Waiting and running chunks of one instance; ``begin`` and ``end`` alternate."""

    def __init__(self, info: InstanceInfo, max_batched_tokens: int) -> None:
        self.waiting: deque[Run] = deque()
        self.running: dict[Run, None] = {}  # in the order of admission
        self.pool = BlockPool(info.kv_capacity_tokens // info.block_tokens)
        self._block = info.block_tokens
        self._max_running = info.max_running
        self._max_batched_tokens = max_batched_tokens
        self._done = 0
        self._joined = 0
        self._ends: list[tuple[int, int, Run]] = []
        self._decoding = 0
        self._decoding_context = 0
        self._growing = [0] * info.block_tokens
        self._filling: Run | None = None  # the only, and newest, run whose prefill is under way
        self._filled: list[tuple[Run, int]] = []

    def push(self, job: ChunkJob, new_tokens: int, stopped: bool) -> Run:
        """Queue a chunk that will generate ``new_tokens``."""
        run = Run(job, new_tokens, stopped)
        # A prompt's last token is always computed, for its logits.
        run.prompt_blocks = (job.prompt_tokens - 1) // self._block
        self.waiting.append(run)
        return run

    @property
    def may_admit(self) -> bool:
        """Whether the next step might take the head of the queue."""
        return (
            bool(self.waiting)
            and len(self.running) < self._max_running
            and self._blocks(self.waiting[0].tokens) <= self.pool.free
        )

    def begin(self) -> Segment | None:
        """Start the next step and say how many like it can follow; None without anything to run."""
        self._make_room()
        budget = self._max_batched_tokens - self._decoding
        if self._filling is not None:
            budget -= self._fill(self._filling, budget)
        self._admit(budget)
        if not self.running:
            return None
        context = self._decoding_context + self._decoding
        if not self._filled:
            return Segment(self._decoding, context, self._decoding, self._like_steps())
        return Segment(
            self._decoding + sum(tokens for _, tokens in self._filled),
            context + sum(run.computed + tokens for run, tokens in self._filled),
            0,
            1,
        )

    def end(self, steps: int) -> list[Run]:
        """Finish ``steps`` steps, no more than begun; return the runs that are complete."""
        self.pool.take(self._growth(self._done + 1, steps - 1))
        self._done += steps
        self._decoding_context += self._decoding * steps
        for run, tokens in self._filled:
            run.computed += tokens
            run.work += tokens
            if run.computed == run.tokens:
                run.tokens += 1
                self._decode(run)
        self._filled.clear()
        finished = []
        while self._ends and self._ends[0][0] <= self._done:
            end, _, run = heappop(self._ends)
            if run.end == end:
                finished.append(run)
        for run in finished:
            del self.running[run]
            self._release(run)
        return finished

    def drop(self, run: Run) -> None:
        """Forget a chunk that waits or runs, between two steps; one that is complete is gone already."""
        if run in self.running:
            del self.running[run]
            self._release(run)
        elif run in self.waiting:
            self.waiting.remove(run)

    def _make_room(self) -> None:
        """Give a block to each run that needs one in this step; preempt the newest while any is short.

        The last one preempted heads the queue and needs more blocks than are left then, so that, as in
        vLLM, nothing is admitted in a step that preempts.
        """
        phase = self._done % self._block
        while self._growing[phase] > self.pool.free:
            newest, _ = self.running.popitem()
            self._release(newest)
            newest.preemptions += 1
            self.waiting.appendleft(newest)
        self.pool.take(self._growing[phase])

    def _admit(self, budget: int) -> None:
        while budget > 0 and self.may_admit:
            run = self.waiting.popleft()
            job = run.job
            reusable = (run.tokens - 1) // self._block
            blocks = self._blocks(run.tokens)
            found = self.pool.admit(job.request_id, job.group_id, run.prompt_blocks, blocks, reusable)
            run.computed = found * self._block
            if not run.preemptions:
                run.cached = run.computed
            self.running[run] = None
            budget -= self._fill(run, budget)

    def _fill(self, run: Run, budget: int) -> int:
        """Compute as much of a run's missing context as the step's budget allows."""
        tokens = min(run.tokens - run.computed, budget)
        computed = run.computed + tokens
        self._filled.append((run, tokens))
        self._filling = run if computed < run.tokens else None
        if run.prompt_blocks and computed >= run.prompt_blocks * self._block:
            self.pool.hold_prompt(run.job.request_id, run.job.group_id)
        return tokens

    def _decode(self, run: Run) -> None:
        """Let a run whose context is computed, and whose first token is out, join the lockstep."""
        end = self._done + run.final_tokens - run.tokens
        run.end = end
        run.phase = (end - run.final_tokens + 1) % self._block
        self._growing[run.phase] += 1
        self._decoding += 1
        self._decoding_context += run.computed
        self._joined += 1
        heappush(self._ends, (end, self._joined, run))

    def _release(self, run: Run) -> None:
        """Take a run out of the lockstep and free its blocks."""
        held = self._blocks(run.tokens)
        if run.end is not None:
            tokens = run.final_tokens - (run.end - self._done)
            run.work += tokens - run.tokens
            run.tokens = tokens
            run.computed = tokens - 1
            run.end = None
            held = self._blocks(run.computed)
            self._growing[run.phase] -= 1
            self._decoding -= 1
            self._decoding_context -= run.computed
        elif run is self._filling:
            self._filling = None
        job = run.job
        self.pool.release(job.request_id, job.group_id, run.prompt_blocks, held, run.computed // self._block)
        run.computed = 0

    def _like_steps(self) -> int:
        """Return the number of steps until a run ends or a block is missing; the queue cannot move before."""
        while self._ends[0][2].end != self._ends[0][0]:
            heappop(self._ends)
        steps = self._ends[0][0] - self._done
        # This step's blocks are taken; whole rounds of all phases, then phase by phase.
        rounds, free = divmod(self.pool.free, self._decoding)
        fitting = 1 + rounds * self._block
        while fitting < steps:
            free -= self._growing[(self._done + fitting) % self._block]
            if free < 0:
                break
            fitting += 1
        return min(steps, fitting)

    def _growth(self, first: int, steps: int) -> int:
        """Return the blocks that decoding runs take in ``steps`` steps from number ``first``."""
        rounds, rest = divmod(steps, self._block)
        start = first % self._block
        part = self._growing[start : start + rest]
        wrapped = self._growing[: max(0, start + rest - self._block)]
        return rounds * self._decoding + sum(part) + sum(wrapped)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block)
