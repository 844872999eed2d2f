"""One simulated instance: a Batch on a VirtualClock, behind the Engine port.

An event costs the same for any number of tokens before it: the engine asks the batch how many
like steps follow, sleeps to the end of the last, and is woken earlier only by what changes them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

import msgspec

from seer_core.errors import EngineError
from seer_core.model import InstanceInfo
from seer_core.model.arrays import Logprobs, Tokens
from seer_core.model.events import InstanceReported
from seer_core.ports.drafting import Drafter, SiblingTokens, StepTimes
from seer_core.ports.engine import ChunkJob, ChunkOutput, InstanceSink
from seer_core.ports.kv import KVPool
from seer_core.ports.weights import WeightSpec
from seer_sim.acceptance import share_out
from seer_sim.account import StepAccount
from seer_sim.batch import Batch, StepRun
from seer_sim.clock import VirtualClock
from seer_sim.cost import CostModel
from seer_sim.decode_cohort import SimChunk
from seer_sim.drafts import METHODS, Drafts, method_of
from seer_sim.lengths import Lengths
from seer_sim.pool import SimKVPool
from seer_sim.profile import BATCH, DRAFT_TOKENS, step_times
from seer_sim.replayed_speculation import ReplayedSpeculation
from seer_sim.speculation import Speculation
from seer_sim.tokens import generate

__all__ = ["SimEngine"]

TYPICAL_RUNNING = 32
"""Requests of the step whose time an instance reports (``InstanceInfo.step_s``)."""


class SimEngine:
    """An Engine that computes times and counts as vLLM would spend them, and makes tokens up.

    As on a real engine, new chunks and aborts take effect between two steps; all that arrive at one
    instant do before the next step begins.  A restarted instance has the weights it was made with:
    version 0, until ``update_weights``.  Of a drafter it needs the pure half only: a policy that gets this
    instance's step times sets the lengths of drafts, and ``methods``, or ``acceptance`` for a method that is
    not among them, decides what comes of them, in expectation; they change the time a chunk takes and none of
    its tokens.  With a ``SimKVPool`` a chunk whose KV is elsewhere waits until it has been brought, one
    transfer after the other, while others are computed.  ``first_steps_s`` holds when the first step of each
    request here began, and ``turn_steps_s`` of each turn that it began, by the context before the turn, where
    an environment answers.  A list set as ``account`` gets what all steps are spent on.  With ``request_s``
    it stands for a server of another program: a request or its answer takes so long on its way, and where KV
    runs short it preempts.
    """

    def __init__(
        self,
        info: InstanceInfo,
        clock: VirtualClock,
        cost: CostModel,
        *,
        lengths: Lengths,
        vocab_size: int,
        max_batched_tokens: int,
        acceptance: Drafts,
        methods: Mapping[str, Drafts] = METHODS,
        start_s: float = 0.0,
        report_interval_s: float = 1.0,
        request_s: float | None = None,
    ) -> None:
        self.id = info.id
        running = min(TYPICAL_RUNNING, info.max_running)
        self._info = msgspec.structs.replace(
            info,
            ends_early=request_s is None,
            overcommits=request_s is not None,
            step_s=cost.pass_s(running, running, running),
            kv_bytes_per_token=round(cost.kv_bytes_per_token),
            prefill_s_per_token=cost.pass_s(max_batched_tokens) / max_batched_tokens,
        )
        self._clock = clock
        self._cost = cost
        self._lengths = lengths
        self._vocab_size = vocab_size
        self._max_batched_tokens = max_batched_tokens
        self._acceptance = acceptance
        self._methods = methods
        self._drafter: Drafter | None = None
        self._kv_pool: SimKVPool | None = None
        self._speculation: Speculation | None = None
        self._start_s = start_s
        self._request_s = request_s
        self._report_interval_s = report_interval_s
        self._not_before_s = 0.0
        self._lost = False
        self.first_steps_s: dict[str, float] = {}
        self.turn_steps_s: dict[tuple[str, int], float] = {}
        self.account: list[StepAccount] | None = None
        self._clear()

    def _clear(self) -> None:
        """Be as new: no sink, no chunks, first weights."""
        self._sink: InstanceSink | None = None
        self._weight_version = 0
        self._asleep = False
        self._runs: dict[str, SimChunk] = {}
        self._reported_s = -self._report_interval_s
        self._stepping_s = 0.0
        self._drafting_s = 0.0
        self._fetched_s = 0.0
        self._start_empty()

    def _start_empty(self) -> None:
        self._batch = Batch(self._info, self._cost, self._max_batched_tokens, self._speculation, self._fetch)
        self._aborted: list[SimChunk] = []
        self._ending: list[SimChunk] = []
        self._segment: StepRun | None = None
        self._segment_began_s = 0.0
        self._steps = 0
        self._cancel_timer: Callable[[], None] | None = None

    def set_drafter(self, drafter: Drafter | None) -> bool:
        """Speculate by this drafter's policy, or not at all, from the next ``start`` on."""
        self._speculate(drafter)
        self._drafter = drafter
        return False

    def set_kv_pool(self, pool: KVPool | None) -> bool:
        """Share KV through a simulated pool; a real one has nothing to give, nor None."""
        self._kv_pool = pool if isinstance(pool, SimKVPool) else None
        return self._kv_pool is not None

    async def start(self, sink: InstanceSink) -> InstanceInfo:
        """Be ready ``start_s`` from now on the virtual clock, after a loss perhaps later."""
        if self._sink is not None:
            raise EngineError(f"instance {self.id!r} has started already; stop it first")
        ready_s = max(self._clock.now() + self._start_s, self._not_before_s)
        if ready_s > self._clock.now():
            await self._clock.sleep_until(ready_s)
        self._speculation = self._speculate(self._drafter)
        self._clear()
        self._lost = False
        self._sink = sink
        pool = self._kv_pool
        self._info = msgspec.structs.replace(
            self._info,
            fetch_s_per_token=None
            if pool is None
            else self._info.kv_bytes_per_token / pool.settings.bandwidth_bytes_per_s,
            kv_reach="" if pool is None or pool.settings.spans_nodes else self._info.node,
        )
        return self._info

    def submit(self, job: ChunkJob) -> None:
        """Queue a chunk; it fails at once if it cannot fit the model or is past its own end."""
        if self._sink is None:
            if self._lost:
                return
            raise EngineError(f"instance {self.id!r} has not started; it cannot take chunk {job.id!r}")
        if job.id in self._runs:
            raise EngineError(f"chunk {job.id!r} is on instance {self.id!r} already")
        tokens = len(job.token_ids)
        generated = tokens - job.context_tokens  # where an environment answers, lengths are those of turns
        left = self._lengths.of(job) - generated
        longest = tokens + job.max_tokens
        if self._asleep:
            self._fail(job, "the instance is asleep; wake it first")
        elif longest > self._info.max_model_tokens:
            limit = self._info.max_model_tokens
            self._fail(job, f"{longest} tokens of context and chunk exceed max_model_tokens = {limit}")
        elif left <= 0:
            self._fail(job, f"{generated} tokens are there of a response of {generated + left}")
        else:
            new_tokens, response_tokens = min(left, job.max_tokens), generated + left
            if self._request_s is not None and job.may_end_early:
                job = msgspec.structs.replace(job, may_end_early=False)
            run = self._batch.run_of(job, tokens, new_tokens, left <= job.max_tokens, response_tokens)
            self._runs[job.id] = run
            self._on_the_way(lambda: self._queue(run))

    def _on_the_way(self, arrive: Callable[[], None]) -> None:
        """Let something arrive, at once or after the time of a request."""
        if self._request_s is None:
            arrive()
        else:
            self._clock.call_at(self._clock.now() + self._request_s, arrive)

    def _queue(self, run: SimChunk) -> None:
        if self._runs.get(run.job.id) is run and not self._fetch(run):
            self._batch.push(run)
            self._wake()

    def abort(self, job_id: str) -> None:
        """Drop a chunk, at the end of the current step if it is running."""
        run = self._runs.pop(job_id, None)
        if run is None:
            return
        if self._segment is not None and run in self._batch.running:
            self._aborted.append(run)
            self._cut()
        else:
            self._batch.drop(run)

    def end_chunk(self, job_id: str) -> None:
        """End a chunk at the end of the step under way, or of the one that gives it its first token."""

        def end() -> None:
            run = self._runs.get(job_id)
            if run is not None:
                self._ending.append(run)
                self._cut()

        self._on_the_way(end)

    def add_sibling_tokens(self, text: SiblingTokens) -> None:
        """Do nothing: no draft of a simulated model comes from text."""

    def forget_group(self, group_id: str) -> None:
        """Let the pool drop the KV of a group or a trajectory; no draft here comes from text."""
        if self._kv_pool is not None:
            self._kv_pool.forget_group(group_id)

    async def measure_steps(
        self, batch: Sequence[int], draft_tokens: Sequence[int], context_tokens: int | None = None
    ) -> StepTimes:
        """Return the times of the cost model, at no cost in time."""
        self._expect_awake()
        drafts = self._acceptance if self._speculation is None else self._speculation.drafts
        return step_times(self._cost, drafts, self._info, batch, draft_tokens, context_tokens)

    async def reset_cache(self) -> None:
        """Forget all cached KV; the policy goes on with the acceptance it has learnt."""
        self._forget("its cache")

    async def update_weights(self, source: WeightSpec, version: int) -> None:
        """Take the version, at no cost in time, and forget all KV; ``source`` is not read."""
        self._forget("its weights")
        self._weight_version = version

    async def sleep(self) -> int:
        """Forget all KV and give back what memory it stands for, at no cost in time; weights take none."""
        if self._sink is None:
            raise EngineError(f"instance {self.id!r} has not started; it cannot sleep")
        if self._asleep:
            return 0
        self._forget("its memory")
        self._asleep = True
        return self._info.kv_capacity_tokens * self._info.kv_bytes_per_token

    async def wake(self) -> None:
        """Take the memory again, at no cost in time."""
        if self._sink is None:
            raise EngineError(f"instance {self.id!r} has not started; it cannot wake")
        self._asleep = False

    async def stop(self) -> None:
        """Drop everything, without a word to the sink."""
        self._stop_timer()
        self._clear()

    def kill(self, reason: str, down_s: float = 0.0) -> None:
        """Die now if alive, and refuse to be up again within ``down_s``."""
        sink = self._sink
        if sink is None:
            return
        self._stop_timer()
        self._clear()
        self._lost = True
        self._not_before_s = self._clock.now() + down_s
        sink.lost(self.id, reason)
        self._clock.settle()

    def _fetch(self, run: SimChunk) -> bool:
        """Begin to bring what the pool has of a run's context and this instance has not; queue it then."""
        pool, job = self._kv_pool, run.job
        if pool is None or run.preemptions or not (job.trajectory or run.tokens > job.prompt_tokens):
            return False
        reusable, here = self._batch.reusable_blocks(run)
        here = max(here, run.fetched_blocks)
        if here >= reusable:
            return False
        # It may look again when it is let in, which is counted as one search.
        find = pool.look if run.sought else pool.find
        found = find(run.kv_name, self._weight_version, reusable, self._info.node)
        run.sought = True
        if found <= here:
            return False
        run.fetched_blocks = found
        seconds = pool.fetch_s(run.kv_name, (found - here) * self._block_bytes)
        self._fetched_s = max(self._fetched_s, self._clock.now()) + seconds

        def arrive() -> None:
            if self._runs.get(job.id) is run:
                self._batch.push(run)
                self._wake()

        self._clock.call_at(self._fetched_s, arrive)
        return True

    @property
    def _block_bytes(self) -> int:
        return self._info.block_tokens * self._info.kv_bytes_per_token

    def _keep(self, run: SimChunk) -> None:
        """Let others find the KV of a chunk that is complete, if its response or its trajectory goes on."""
        if self._kv_pool is None:
            return
        goes_on = run.job.turns if run.stopped else not run.job.last
        if not (goes_on or run.job.trajectory):
            self._kv_pool.drop(run.kv_name)
        else:
            # The last token was sampled, never computed.
            blocks = (run.final_tokens - 1) // self._info.block_tokens
            version, node = self._weight_version, self._info.node
            group = run.job.trajectory or run.job.group_id
            self._kv_pool.put(run.kv_name, version, blocks, self._block_bytes, node, group)

    def _speculate(self, drafter: Drafter | None) -> Speculation | None:
        """Return speculation by a new policy of the drafter's."""
        if drafter is None:
            return None
        source = drafter.source()
        drafts = method_of(source, self._methods, self._acceptance)
        batch = (*BATCH, self._info.max_running)
        policy = drafter.policy(step_times(self._cost, drafts, self._info, batch, DRAFT_TOKENS))
        if policy is None:
            raise EngineError(
                f"instance {self.id!r} is simulated: it needs a drafter with a policy, and"
                f" {type(drafter).__name__} has none; choose another drafter, or another engine"
            )
        if drafts.replayed is not None:
            return ReplayedSpeculation(policy, drafts, drafts.replayed, source.draft_tokens, self._cost)
        return Speculation(policy, drafts, source.draft_tokens)

    def _forget(self, what: str) -> None:
        """Empty the KV cache, and with it what a step under way still holds of aborted chunks."""
        self._expect_awake()
        if self._runs:
            raise EngineError(f"instance {self.id!r} is busy; {what} can change only while it is idle")
        self._stop_timer()
        self._start_empty()

    def _expect_awake(self) -> None:
        if self._asleep:
            raise EngineError(f"instance {self.id!r} is asleep; wake it first")

    def _stop_timer(self) -> None:
        if self._cancel_timer is not None:
            self._cancel_timer()

    def _fail(self, job: ChunkJob, reason: str) -> None:
        """Give a chunk back in a callback of its own, since ``submit`` must not call the sink."""
        sink = self._sink
        assert sink is not None

        def fail() -> None:
            if sink is self._sink:
                sink.chunk_failed(self.id, job.id, reason)

        self._clock.call_at(self._clock.now(), fail)

    def _wake(self) -> None:
        """See to it that a step begins soon enough for a chunk just queued."""
        if self._cancel_timer is None:
            self._begin_later()
        elif len(self._batch.waiting) == 1 and self._batch.may_admit:
            self._cut()

    def _begin_later(self) -> None:
        """Begin a step after everything else that happens at this instant."""
        self._cancel_timer = self._clock.call_at(self._clock.now(), self._begin, last=True)

    def _begin(self) -> None:
        self._cancel_timer = None
        self._segment = self._batch.begin()
        if self._segment is not None:
            self._segment_began_s = self._clock.now()
            for job in self._batch.filling():
                self.first_steps_s.setdefault(job.request_id, self._segment_began_s)
                if job.turns:
                    turn = job.request_id, job.context_tokens
                    self.turn_steps_s.setdefault(turn, self._segment_began_s)
            self._end_after(1 if self._ending else self._segment.steps)
        else:
            self._answer(self._batch.take_ended_early())

    def _end_after(self, steps: int) -> None:
        self._steps = steps
        self._cancel_timer = self._clock.call_at(self._time_after(steps), self._end)

    def _time_after(self, steps: int) -> float:
        """Return when the first ``steps`` steps of the segment are over."""
        segment = self._segment
        assert segment is not None
        return self._segment_began_s + segment.after(steps)

    def _cut(self) -> None:
        """End the segment with the step under way."""
        if self._segment is None or self._steps == 1:
            return
        now = self._clock.now()
        steps = 1 + bisect_left(range(1, self._steps), now, key=self._time_after)
        if steps < self._steps:
            assert self._cancel_timer is not None
            self._cancel_timer()
            self._end_after(steps)

    def _end(self) -> None:
        assert self._segment is not None
        if self.account is not None:
            self.account.append(self._batch.account(self._segment, self._steps, self._segment_began_s))
        finished = self._batch.end(self._steps)
        self._stepping_s += self._clock.now() - self._segment_began_s
        self._drafting_s += self._segment.drafting_after(self._steps)
        self._segment = None
        self._begin_later()
        for run in self._aborted:
            self._batch.drop(run)
        self._aborted.clear()
        self._report()
        if self._ending:
            finished += self._end_early()
        self._answer(finished)

    def _end_early(self) -> list[SimChunk]:
        """End the chunks that are to end and have a token, and return them."""
        ended: list[SimChunk] = []
        waiting: list[SimChunk] = []
        for run in self._ending:
            if self._batch.end_early(run):
                ended.append(run)
            elif run.job.id in self._runs:
                waiting.append(run)
        self._ending = waiting
        return ended

    def _answer(self, finished: list[SimChunk]) -> None:
        sink = self._sink
        assert sink is not None
        for run in finished:
            if self._runs.pop(run.job.id, None) is run:
                self._keep(run)
                self._on_the_way(partial(self._deliver, sink, self._output(run)))

    def _deliver(self, sink: InstanceSink, output: ChunkOutput) -> None:
        if sink is self._sink:
            sink.chunk_finished(self.id, output)

    def _report(self) -> None:
        """Send telemetry as it is before anything follows from the chunks now finished."""
        now = self._clock.now()
        if now - self._reported_s < self._report_interval_s or not self._batch.running:
            return
        self._reported_s = now
        assert self._sink is not None
        batch = self._batch
        self._sink.reported(
            InstanceReported(
                self.id,
                running=len(batch.running),
                waiting=len(batch.waiting),
                kv_usage=batch.pool.usage,
                stepping_s=self._stepping_s,
                drafting_s=self._drafting_s,
            )
        )

    def _output(self, run: SimChunk) -> ChunkOutput:
        job = run.job
        start = run.final_tokens - run.new_tokens
        token_ids, logprobs = generate(job.seed, start, run.new_tokens, run.stopped, self._vocab_size)
        steps = run.steps
        drafted_at, accepted_at = [], []
        if self._speculation is not None:
            drafted_at = run.drafted_at
            accepted_at = share_out(run.new_tokens - steps, drafted_at, self._speculation.rates(run))
        return ChunkOutput(
            job_id=job.id,
            # Sequences that make their values when asked, for the core asks for the length only.
            token_ids=cast("Tokens", token_ids),
            logprobs=cast("Logprobs", logprobs),
            stopped=run.stopped,
            cached_tokens=run.cached,
            prefilled_tokens=start - run.cached - run.pool_tokens,
            computed_tokens=run.work,
            preemptions=run.preemptions,
            weight_version=self._weight_version,
            steps=steps,
            drafted_at=drafted_at,
            accepted_at=accepted_at,
            pool_tokens=run.pool_tokens,
        )
