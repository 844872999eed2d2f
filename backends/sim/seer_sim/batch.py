"""Continuous batching as vLLM does it, many steps at a time.

A step gives every running request one token, or more with drafts, or computes a piece of its prompt.
Decoding requests move in ``DecodeCohort``, all of them in one, or with drafts one for each class that gets on
at its own pace; so between two events nothing needs to be touched, and the number of like steps that follow
is computed.

The rules are those of vLLM 0.32's V1 scheduler, first come first served: running requests first; the
newest is preempted when a block is missing, and recomputed; waiting ones are admitted in order while
their whole sequence fits; prompts share the step's token budget.
Simplified: a prompt's blocks are all taken at its admission, not piece by piece; those of decoding
requests together, after a step's preemptions; a draft token that is rejected never takes a block; and a
step whose drafts would exceed its token budget has none at all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from functools import cache
from operator import attrgetter

import msgspec

from seer_core.model import InstanceInfo
from seer_core.ports.engine import ChunkJob
from seer_sim.account import StepAccount
from seer_sim.cost import CostModel
from seer_sim.decode_cohort import TOKEN_UNIT, DecodeCohort, SimChunk
from seer_sim.kv import BlockPool
from seer_sim.speculation import Speculation

__all__ = ["Batch", "StepRun"]


class StepRun(msgspec.Struct, frozen=True, gc=False):
    """Up to ``steps`` like steps: what the first takes, and how much more each later one; so for drafting."""

    steps: int
    step_s: float
    growth_s: float
    drafting_s: float
    drafting_growth_s: float

    def after(self, steps: int) -> float:
        """Return the seconds of the first ``steps`` steps."""
        return steps * self.step_s + steps * (steps - 1) / 2 * self.growth_s

    def drafting_after(self, steps: int) -> float:
        """Return the part of those seconds spent on drafting."""
        return steps * self.drafting_s + steps * (steps - 1) / 2 * self.drafting_growth_s


class Batch:
    """Waiting and running chunks of one instance; ``begin`` and ``end`` alternate.

    ``fetch`` is asked of each run that could be admitted whether it has to wait for KV from elsewhere; it is
    pushed again when that has come.
    """

    def __init__(
        self,
        info: InstanceInfo,
        cost: CostModel,
        max_batched_tokens: int,
        speculation: Speculation | None = None,
        fetch: Callable[[SimChunk], bool] = lambda run: False,
    ) -> None:
        self.waiting: deque[SimChunk] = deque()
        self.running: dict[SimChunk, None] = {}  # in the order of admission
        self.pool = BlockPool(info.kv_capacity_tokens // info.block_tokens)
        self._cost = cost
        self._block = info.block_tokens
        self._max_running = info.max_running
        self._max_batched_tokens = max_batched_tokens
        self._speculation = speculation
        self._fetch = fetch
        self._cohorts: dict[tuple[bool, int] | None, DecodeCohort] = {}
        self._moving: list[DecodeCohort] = []  # those that have runs in the step under way
        self._joined = 0
        self._ended_early: list[SimChunk] = []  # for want of KV, since ``end``
        self._filling: SimChunk | None = None  # the only, and newest, run whose prefill is under way
        self._filled: list[tuple[SimChunk, int]] = []
        self._attention_s = cache(cost.attention_s)

    def run_of(
        self, job: ChunkJob, tokens: int, new_tokens: int, stopped: bool, response_tokens: int = 0
    ) -> SimChunk:
        """Return the run of a chunk that has ``tokens`` and will generate ``new_tokens``, to be queued."""
        run = SimChunk(job, tokens, new_tokens, stopped, response_tokens)
        # A prompt's last token is always computed, for its logits.  That of a turn is its trajectory so far.
        shared = 0 if job.trajectory else (job.prompt_tokens - 1) // self._block
        run.prompt = job.group_id, shared
        return run

    def push(self, run: SimChunk) -> None:
        """Queue a run."""
        self.waiting.append(run)

    def reusable_blocks(self, run: SimChunk) -> tuple[int, int]:
        """Return the blocks that a run need not compute if another has them, and how many it has."""
        reusable = (run.tokens - 1) // self._block
        return reusable, self.pool.found(run.kv_name, run.prompt, reusable)

    @property
    def may_admit(self) -> bool:
        """Whether the next step might take the head of the queue."""
        return (
            bool(self.waiting)
            and len(self.running) < self._max_running
            and self._missing(self.waiting[0]) <= self.pool.free
        )

    def begin(self) -> StepRun | None:
        """Start the next step and return how many like it can follow; None without anything to run."""
        speculation, cost = self._speculation, self._cost
        self._moving = [cohort for cohort in self._cohorts.values() if cohort.size]
        if speculation is not None and self._moving:
            speculation.draft(self._moving, self._max_batched_tokens)
        short = self._make_room()
        if short:
            self._moving = [cohort for cohort in self._moving if cohort.size]
        requests = 0
        positions = 0.0
        attention_s = growth_s = growth_tokens = 0.0
        for cohort in self._moving:
            computed = cohort.size * cohort.positions
            token_s = self._attention_s(cohort.positions)
            growth = cohort.size * cohort.rate / TOKEN_UNIT
            requests += cohort.size
            positions += computed
            attention_s += (cohort.context / TOKEN_UNIT + computed) * token_s
            growth_tokens += growth
            growth_s += growth * token_s
        budget = int(self._max_batched_tokens - positions)
        if self._filling is not None:
            budget -= self._fill(self._filling, budget)
        if self.waiting and not short:
            self._admit(budget)
        if not self.running:
            return None
        requests += len(self._filled)
        sampled = positions + len(self._filled)
        for run, tokens in self._filled:
            positions += tokens
            attention_s += cost.prefill_attention_s(run.computed, tokens)
        drafting_s, drafting_growth_s = (
            (0.0, 0.0) if speculation is None else speculation.drafting_s(self._moving)
        )
        # Chunks that ended early are answered after this step.  Draft lengths were for those that have been
        # stopped as well: they are set anew after a step.
        single = self._filled or self._ended_early or (short and speculation is not None)
        return StepRun(
            1 if single else self._like_steps(growth_tokens),
            cost.pass_s(positions, requests, sampled) + attention_s + drafting_s,
            growth_s + drafting_growth_s,
            drafting_s,
            drafting_growth_s,
        )

    def account(self, run: StepRun, steps: int, began_s: float) -> StepAccount:
        """Return what the first ``steps`` steps of ``run`` are spent on; it has begun, and not ended."""
        requests, positions, attention_s = 0, 0.0, 0.0
        for cohort in self._moving:
            computed = cohort.size * cohort.positions
            requests += cohort.size
            positions += computed
            attention_s += (cohort.context / TOKEN_UNIT + computed) * self._attention_s(cohort.positions)
        cost = self._cost
        # The weights would be read without contexts to compute as well, if anything decodes.
        floor_s = cost.overhead_s + cost.weights_s(positions or sum(tokens for _, tokens in self._filled))
        requests_s = cost.pass_s(positions, requests, positions) - floor_s if requests else 0.0
        prefill_s = run.step_s - run.drafting_s - attention_s - floor_s - requests_s if self._filled else 0.0
        growth_s = steps * (steps - 1) / 2 * (run.growth_s - run.drafting_growth_s)
        pool = self.pool
        return StepAccount(
            began_s=began_s,
            ended_s=began_s + run.after(steps),
            floor_s=steps * floor_s,
            attention_s=steps * attention_s + growth_s,
            requests_s=steps * requests_s,
            prefill_s=prefill_s,
            drafts_s=run.drafting_after(steps),
            kv_first=pool.usage,
            kv_last=pool.usage + (self._growth(steps, since=1) / pool.capacity if steps > 1 else 0.0),
        )

    def filling(self) -> list[ChunkJob]:
        """Return the chunks whose context the step under way computes."""
        return [run.job for run, _ in self._filled]

    def end(self, steps: int) -> list[SimChunk]:
        """Finish ``steps`` steps, no more than begun; return the runs that are complete."""
        moving = self._moving
        if steps > 1:
            self.pool.take(self._growth(steps, since=1))
        for cohort in moving:
            cohort.move(steps)
        if self._speculation is not None:
            self._speculation.learn(moving, steps)
        for run, tokens in self._filled:
            run.computed += tokens
            run.work += tokens
            if run.computed == run.tokens:
                run.tokens += 1
                run.fills += 1
                self._decode(run)
        self._filled.clear()
        finished: list[SimChunk] = []
        for cohort in self._cohorts.values():
            if cohort.size:
                finished += cohort.ended()
        if len(finished) > 1:
            finished.sort(key=attrgetter("joined"))
        for run in finished:
            del self.running[run]
            self._release(run)
        return finished + self.take_ended_early()

    def take_ended_early(self) -> list[SimChunk]:
        """Return the chunks that ended early when the last step began, once."""
        ended, self._ended_early = self._ended_early, []
        return ended

    def end_early(self, run: SimChunk) -> bool:
        """End a chunk with the tokens that it has, between two steps; return whether it has one."""
        if run in self.running:
            if run.cohort is None:
                return False
            del self.running[run]
            self._release(run)
        elif run in self.waiting and run.final_tokens - run.new_tokens < run.tokens:
            self.waiting.remove(run)
        else:
            return False
        run.end_early()
        return True

    def drop(self, run: SimChunk) -> None:
        """Forget a chunk that waits or runs, between two steps; one that is complete is gone already."""
        if run in self.running:
            del self.running[run]
            self._release(run)
        elif run in self.waiting:
            self.waiting.remove(run)

    def _make_room(self) -> bool:
        """Give each run the blocks that it needs in this step; while any is short, stop the newest.

        It ends early if it may and has a token, and is preempted otherwise.  Returns whether any was stopped:
        as in vLLM, nothing is admitted in such a step.
        """
        short = False
        while (blocks := self._growth(1)) > self.pool.free:
            newest, _ = self.running.popitem()
            decoded = newest.cohort is not None
            self._release(newest)
            if decoded and newest.job.may_end_early:
                newest.end_early()
                self._ended_early.append(newest)
            else:
                newest.preemptions += 1
                self.waiting.appendleft(newest)
            short = True
        self.pool.take(blocks)
        return short

    def _admit(self, budget: int) -> None:
        while budget > 0 and self.may_admit:
            run = self.waiting.popleft()
            if self._fetch(run):  # what was here when it was queued has gone since
                continue
            reusable = (run.tokens - 1) // self._block
            blocks = self._blocks(run.tokens)
            found = self.pool.admit(run.kv_name, run.prompt, blocks, reusable)
            run.computed = found * self._block
            if not run.preemptions:
                run.cached = run.computed
                if run.fetched_blocks > found:
                    fetched = run.fetched_blocks * self._block
                    self._share(run, fetched)
                    run.computed = fetched
                    run.pool_tokens = fetched - run.cached
            self.running[run] = None
            budget -= self._fill(run, budget)

    def _fill(self, run: SimChunk, budget: int) -> int:
        """Compute as much of a run's missing context as the step's budget allows."""
        tokens = min(run.tokens - run.computed, budget)
        computed = run.computed + tokens
        self._filled.append((run, tokens))
        self._filling = run if computed < run.tokens else None
        self._share(run, computed)
        return tokens

    def _share(self, run: SimChunk, computed: int) -> None:
        """Let siblings share the run's prompt if it has all of it with so many tokens, and had not before.

        They can in the very step that computes it: vLLM looks for cached blocks when it schedules.
        """
        if run.computed < run.prompt[1] * self._block <= computed:
            self.pool.share(run.prompt)

    def _decode(self, run: SimChunk) -> None:
        """Let a run whose context is computed, and whose next token is out, join its cohort."""
        speculation = self._speculation
        key = None if speculation is None else speculation.class_of(run)
        cohort = self._cohorts.get(key)
        if cohort is None:
            cohort = (
                DecodeCohort(self._block) if speculation is None else speculation.cohort(run, self._block)
            )
            self._cohorts[key] = cohort
        self._joined += 1
        cohort.join(run, self._joined)

    def _release(self, run: SimChunk) -> None:
        """Take a run out of its cohort and free its blocks."""
        held = self._blocks(run.tokens)
        if run.cohort is not None:
            run.cohort.leave(run)
            held = self._blocks(run.computed)
        elif run is self._filling:
            self._filling = None
        self.pool.release(run.kv_name, run.prompt, held, run.computed // self._block)
        run.computed = 0

    def _like_steps(self, growth_tokens: float) -> int:
        """Return the number of steps until a run ends or a block is missing; the queue cannot move before.

        The first step's blocks are taken.
        """
        steps = min([cohort.steps_to_end() for cohort in self._moving])
        free = self.pool.free
        # A run takes its share of blocks but for one, and of ticks but for one.
        per_step = growth_tokens / self._block
        spread = len(self.running) * (1 + 1 / self._block)
        if per_step * steps + spread <= free or self._growth(steps, since=1) <= free:
            return steps
        fewest = max(1, 1 + int((free - spread) / per_step))
        most = min(steps, 2 + int((free + spread) / per_step))
        candidates = range(fewest, most)
        return fewest - 1 + bisect_right(candidates, free, key=lambda k: self._growth(k, since=1))

    def _growth(self, steps: int, since: int = 0) -> int:
        """Return the blocks that decoding runs take in ``steps`` steps, less those of the first ``since``."""
        blocks = 0
        for cohort in self._moving:
            blocks += cohort.growth(steps, since)
        return blocks

    def _missing(self, run: SimChunk) -> int:
        """Return the free blocks that a run takes when it is admitted."""
        return self.pool.missing(run.prompt, self._blocks(run.tokens))

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block)
