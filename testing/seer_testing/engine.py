"""Contract of the Protocols ``EngineFleet`` and ``InstanceClient`` in ``seer_core.ports.engine``."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import wraps
from math import isfinite
from typing import Any

import pytest
from msgspec import structs

from seer_core.errors import EngineError
from seer_core.model import InstanceInfo, Sampling
from seer_core.model.arrays import Tokens
from seer_core.model.events import InstanceDegraded, InstanceReported
from seer_core.ports.drafting import SiblingTokens
from seer_core.ports.engine import (
    ChunkEnder,
    ChunkJob,
    ChunkOutput,
    ChunkPiece,
    Clock,
    EngineFleet,
    InstanceClient,
    Tokenizer,
)
from seer_core.ports.weights import directory
from seer_testing.support import run_within

__all__ = ["EngineContract"]

TOKENS = 24
"""True length of the responses, for engines that read ``known_tokens``."""


def _played(test: Callable[[EngineContract], Coroutine[Any, Any, None]]) -> Callable[[EngineContract], None]:
    """Return a test that pytest can call: it runs the coroutine to its end, within ``patience_s``."""

    @wraps(test)
    def play(self: EngineContract) -> None:
        self._play(test(self))

    return play


def _on_stage(
    test: Callable[[EngineContract, _Stage], Coroutine[Any, Any, None]],
) -> Callable[[EngineContract], None]:
    """Return a test that pytest can call: it starts engines, or takes those that tests share."""

    async def on_stage(self: EngineContract) -> None:
        async with self._stage() as stage:
            await test(self, stage)

    on_stage.__name__, on_stage.__doc__ = test.__name__, test.__doc__
    return _played(on_stage)


class EngineContract:
    """Tests of an ``EngineFleet`` and its engines; ``make`` returns a new fleet, nothing of it started.

    It needs two engines at least, with room for 64 tokens a response.  ``exact``: the same seed gives the
    same tokens, however a response is divided and wherever it runs.  ``weights`` is a directory of other
    weights.  ``shared``: tests use the same started engines, but for those of a start, which pays where it
    takes seconds.
    """

    patience_s: float = 60.0
    """Seconds after which a wait has failed."""
    exact: bool = True
    weights: str = "other weights"
    shared: bool = False

    _loop: asyncio.AbstractEventLoop | None = None
    _started: _Stage | None = None

    def make(self) -> EngineFleet:
        """Return a new fleet of two engines or more, nothing of it started."""
        raise NotImplementedError("define make(), which returns a new fleet of engines, not yet started")

    @_played
    async def test_it_is_a_fleet_of_engines(self) -> None:
        """Their ids are distinct, and the clock and the tokenizer are what they must be."""
        fleet = self.make()
        assert isinstance(fleet, EngineFleet)
        assert isinstance(fleet.clock, Clock)
        assert fleet.tokenizer is None or isinstance(fleet.tokenizer, Tokenizer)
        assert all(isinstance(engine, InstanceClient) for engine in fleet.engines)
        ids = [engine.id for engine in fleet.engines]
        assert len(set(ids)) == len(ids) >= 2, f"needs two engines with ids of their own, has {ids}"
        assert fleet.model.vocab_size > 0
        assert fleet.model.max_model_tokens >= 64

    @_on_stage
    async def test_an_instance_says_what_it_can_hold(self, stage: _Stage) -> None:
        """KV in whole blocks, and no more tokens a response than the model allows."""
        for engine, info in zip(stage.fleet.engines, stage.infos, strict=True):
            assert isinstance(info, InstanceInfo)
            assert info.id == engine.id
            assert info.block_tokens >= 1
            assert info.kv_capacity_tokens >= info.block_tokens
            assert info.kv_capacity_tokens % info.block_tokens == 0
            assert info.max_running >= 1
            assert 64 <= info.max_model_tokens <= stage.fleet.model.max_model_tokens

    @_on_stage
    async def test_every_chunk_is_answered_once(self, stage: _Stage) -> None:
        """Also where there are many; and every answer is of a chunk that was submitted."""
        jobs = [stage.job(number, max_tokens=1 + number % 24) for number in range(40)]
        await stage.run(jobs)
        await stage.run([stage.job(99)])  # time for what should not come
        assert set(stage.sink.answers) == {job.id for job in [*jobs, stage.job(99)]}
        for job_id, answers in stage.sink.answers.items():
            assert len(answers) == 1, f"answered chunk {job_id!r} {len(answers)} times"
        assert not stage.sink.losses

    @_on_stage
    async def test_a_chunk_s_account_adds_up(self, stage: _Stage) -> None:
        """Tokens, log-probs, and what they cost."""
        for name in ("first", "cached"):
            jobs = [
                stage.job(number, name=f"{name} {number}", max_tokens=tokens)
                for number, tokens in enumerate((5, 20, 30, 30))
            ]
            for job, output in zip(jobs, await stage.run(jobs), strict=True):
                _check_account(job, output, stage.fleet.model.vocab_size)

    @_on_stage
    async def test_pieces_of_a_running_chunk_are_what_it_will_have_written(self, stage: _Stage) -> None:
        """They come in order, before the answer, and only of chunks that stream; an engine may send none."""
        jobs = [stage.job(number, max_tokens=TOKENS, streams=number > 0) for number in range(3)]
        for job, output in zip(jobs, await stage.run(jobs), strict=True):
            pieces = stage.sink.pieces[job.id]
            assert job.streams or not pieces, f"pieces of chunk {job.id!r}, which does not stream"
            sent = 0
            for piece in pieces:
                end = sent + len(piece.token_ids)
                assert sent == piece.start < end, f"a piece of {job.id!r} is empty or out of order"
                assert piece.token_ids == list(output.token_ids[sent:end]), "sent other tokens"
                assert piece.logprobs == list(output.logprobs[sent:end]), "sent other log-probs"
                sent = end

    @_on_stage
    async def test_a_chunk_that_ends_early_has_a_token_at_least(self, stage: _Stage) -> None:
        """The response is the same; an instance whose info does not say `ends_early` gives all tokens."""
        numbers = range(40)
        written: dict[int, list[int]] = {number: [] for number in numbers}
        stopped: set[int] = set()
        for turn in range(TOKENS):
            jobs = {
                number: stage.job(
                    number,
                    name=f"turn {turn} of {number}",
                    max_tokens=TOKENS - len(tokens),
                    generated=tokens,
                    may_end_early=True,
                )
                for number, tokens in written.items()
                if number not in stopped and len(tokens) < TOKENS
            }
            if not jobs:
                break
            for number, output in zip(jobs, await stage.run(list(jobs.values())), strict=True):
                _check_account(jobs[number], output, stage.fleet.model.vocab_size)
                assert output.token_ids, f"chunk {output.job_id!r} ended without a token"
                written[number] += output.token_ids
                if output.stopped:
                    stopped.add(number)
                elif not stage.infos[0].ends_early:
                    assert len(written[number]) == TOKENS, "ended early, but its info does not say so"
        if self.exact:
            wholes = [stage.job(number, name=f"whole {number}", max_tokens=TOKENS) for number in numbers]
            for number, output in zip(numbers, await stage.run(wholes), strict=True):
                assert written[number] == list(output.token_ids), "chunks that end early gave other tokens"

    @_on_stage
    async def test_a_chunk_ends_on_demand(self, stage: _Stage) -> None:
        """With a token at least; what follows is the same.  An engine that cannot lets the chunk go on."""
        engine, info = stage.fleet.engines[0], stage.infos[0]
        end_chunk = engine.end_chunk if isinstance(engine, ChunkEnder) else lambda job_id: None
        end_chunk("no such chunk")
        numbers = range(8)
        jobs = [stage.job(number, name=f"ended {number}", max_tokens=TOKENS) for number in numbers]
        for job in jobs:
            stage.submit(job)
        for job in jobs[1:]:
            stage.sink.calling = "end_chunk"
            end_chunk(job.id)
            stage.sink.calling = None
        await stage.answered(jobs)
        parts = [stage.output(job) for job in jobs]
        rests: dict[int, ChunkJob] = {}
        for number, job, part in zip(numbers, jobs, parts, strict=True):
            _check_account(structs.replace(job, may_end_early=number > 0), part, stage.fleet.model.vocab_size)
            assert part.token_ids, f"chunk {job.id!r} ended without a token"
            if not part.stopped and (left := TOKENS - len(part.token_ids)):
                rests[number] = stage.job(
                    number, name=f"rest of {number}", max_tokens=left, generated=list(part.token_ids)
                )
        if info.ends_early:
            assert rests, "no chunk ended early, though its info says that they do"
        outputs = dict(zip(rests, await stage.run(list(rests.values())), strict=True))
        if self.exact:
            wholes = [stage.job(number, name=f"not ended {number}", max_tokens=TOKENS) for number in numbers]
            for number, whole in zip(numbers, await stage.run(wholes), strict=True):
                tokens = [*parts[number].token_ids, *(outputs[number].token_ids if number in outputs else ())]
                assert tokens == list(whole.token_ids), "a chunk that was ended gave other tokens"

    @_played
    async def test_the_same_seed_gives_the_same_tokens(self) -> None:
        """Whole, or divided and moved; of another run of the same engines, or of the other instance."""
        if not self.exact:
            pytest.skip("this engine does not promise equal tokens")
        async with self._stage() as stage:
            [output] = await stage.run([stage.job(3, max_tokens=TOKENS)])
            whole = list(output.token_ids)
            divided: list[int] = []
            number = 0
            while len(divided) < TOKENS:
                tokens = min(5, TOKENS - len(divided))
                job = stage.job(3, name=f"part {number}", max_tokens=tokens, generated=divided)
                [output] = await stage.run([job], on=number % 2)
                divided += output.token_ids
                number += 1
                if output.stopped:
                    break
                assert len(output.token_ids) == tokens, "neither stopped nor full"
            version = stage.version
        async with self._stage(self.make(), most=1) as stage:
            if version:
                await stage.update(self.weights, version)
            [output] = await stage.run([stage.job(3, max_tokens=TOKENS)])
        assert list(output.token_ids) == whole, "two runs gave other tokens"
        assert divided == whole, "divided and moved, it gave other tokens"

    @_on_stage
    async def test_the_sink_is_never_called_from_within_submit_or_abort(self, stage: _Stage) -> None:
        """The runtime is in the midst of a decision then."""
        too_long = stage.job(8, max_tokens=2 * stage.fleet.model.max_model_tokens)
        for job in (stage.job(7), too_long):
            stage.submit(job)
            stage.abort(job.id)
        await stage.run([stage.job(99)])  # time for answers that were on their way, or the next test has them

    @_on_stage
    async def test_an_aborted_chunk_disturbs_no_other(self, stage: _Stage) -> None:
        """One that is unknown is ignored; one that is answered all the same is answered once."""
        jobs = [stage.job(number) for number in range(6)]
        for job in jobs:
            stage.submit(job)
        stage.abort("unknown")
        for job in jobs[::2]:
            stage.abort(job.id)
        await stage.answered(jobs[1::2])
        await stage.run([stage.job(99)])
        assert all(len(answers) == 1 for answers in stage.sink.answers.values())

    @_on_stage
    async def test_a_chunk_that_cannot_be_run_is_given_back(self, stage: _Stage) -> None:
        """With the reason; the instance lives on."""
        job = stage.job(0, max_tokens=2 * stage.fleet.model.max_model_tokens)
        stage.submit(job)
        await stage.answered([job])
        [answer] = stage.sink.answers[job.id]
        assert isinstance(answer, str), "answered a chunk longer than the model with tokens"
        assert answer, "gave a chunk back without a reason"
        await stage.run([stage.job(1)])

    @_on_stage
    async def test_what_is_cached_is_forgotten_when_it_must_be(self, stage: _Stage) -> None:
        """By ``reset_cache``, by other weights, and by a restart."""
        engine = stage.fleet.engines[0]
        for turn, forget in enumerate(("reset_cache", "update_weights", "stop")):
            await stage.run([stage.job(0, name=f"{turn} before", prompt=40)])
            if forget == "reset_cache":
                await engine.reset_cache()
            elif forget == "update_weights":
                await stage.update(self.weights)
            else:
                await engine.stop()
                await stage.start_again(self.weights)
            [output] = await stage.run([stage.job(0, name=f"{turn} after", prompt=40)])
            assert output.cached_tokens == 0, f"{forget}() left {output.cached_tokens} tokens of KV"
            assert output.weight_version == stage.version

    @_on_stage
    async def test_after_a_sleep_it_answers_as_before(self, stage: _Stage) -> None:
        """By the same weights, without the KV of before; asleep it gives chunks back and refuses calls."""
        engine = stage.fleet.engines[0]
        await stage.update(self.weights)
        [before] = await stage.run([stage.job(0, name="before", prompt=40)])
        freed = [await engine.sleep(), await engine.sleep()]
        assert freed[0] >= 0
        assert freed[1] == 0, f"asleep already, it gave {freed[1]} bytes"
        job = stage.job(1, name="asleep")
        stage.submit(job)
        await stage.answered([job])
        [answer] = stage.sink.answers["asleep"]
        assert isinstance(answer, str), "answered a chunk asleep"
        for name, call in (
            (
                "update_weights",
                lambda: engine.update_weights(directory(self.weights), stage.version + 1),
            ),
            ("reset_cache", engine.reset_cache),
            ("measure_steps", lambda: engine.measure_steps((1,), (0,))),
        ):
            assert await _refused(call()), f"took {name}() asleep"
        await engine.wake()
        await engine.wake()
        [after] = await stage.run([stage.job(0, name="after", prompt=40)])
        assert after.cached_tokens == 0, f"sleep() left {after.cached_tokens} tokens of KV"
        assert after.weight_version == stage.version
        if self.exact:
            assert after.token_ids == before.token_ids, "asleep it forgot its weights"

    @_played
    async def test_it_sleeps_only_while_it_is_idle_and_up_and_starts_awake(self) -> None:
        """A busy one refuses and goes on with its chunk; one that was stopped asleep starts awake."""
        unstarted = self.make().engines[0]
        assert await _refused(unstarted.sleep()), "slept before it had started"
        assert await _refused(unstarted.wake()), "woke before it had started"
        async with self._stage() as stage:
            engine = stage.fleet.engines[0]
            job = stage.job(0, max_tokens=TOKENS)
            stage.submit(job)
            assert await _refused(engine.sleep()), "slept in the midst of a chunk"
            await stage.answered([job])
            assert isinstance(stage.sink.answers[job.id][0], ChunkOutput)
            await engine.sleep()
            await engine.stop()
            await stage.start_again(self.weights)
            await stage.run([stage.job(1)])

    @_played
    async def test_it_stops_twice_and_says_nothing_afterwards(self) -> None:
        """Also if it never started."""
        for engine in self.make().engines:
            await engine.stop()
        async with self._stage() as stage:
            first = stage.fleet.engines[0]
            job = stage.job(0)
            stage.submit(job)
            await first.stop()
            await first.stop()
            stage.sink.answers.clear()
            await stage.run([stage.job(1)], on=1)
            assert job.id not in stage.sink.answers, f"{first.id} spoke after it was stopped"
            await stage.start_again(self.weights)

    @_on_stage
    async def test_without_drafter_and_pool_it_goes_without(self, stage: _Stage) -> None:
        """``set_kv_pool(None)`` is False; an unknown group and its siblings' tokens are no errors."""
        for engine in self.make().engines:
            assert not engine.set_drafter(None)
            assert engine.set_kv_pool(None) is False
        engine = stage.fleet.engines[0]  # which was given neither before its start
        engine.forget_group("unknown")
        engine.add_sibling_tokens(SiblingTokens("", "unknown", "unknown/0", 0, Tokens([1])))
        [output] = await stage.run([stage.job(0)])
        assert (output.pool_tokens, sum(output.drafted_at)) == (0, 0)

    @_on_stage
    async def test_steps_are_measured_on_the_grid_asked_for(self, stage: _Stage) -> None:
        """With as much context as asked for, or as it likes; or it says that it cannot."""
        engine = stage.fleet.engines[0]
        for context in ((), (16,)):
            try:
                times = await engine.measure_steps((1, 2), (0,), *context)
            except EngineError:
                continue
            assert set(times.batch) <= {1, 2}
            assert times.draft_tokens == (0,)

    @classmethod
    def teardown_class(cls) -> None:
        """Stop the engines that the tests have shared; pytest calls it after the last one."""
        if cls._loop is not None:
            if cls._started is not None:
                cls._loop.run_until_complete(cls._started.stop())
            cls._loop.close()
        cls._loop = cls._started = None

    @asynccontextmanager
    async def _stage(
        self, fleet: EngineFleet | None = None, most: int | None = None
    ) -> AsyncIterator[_Stage]:
        """Start the engines of a fleet, at ``most`` so many, and stop them in the end.

        Without a fleet they are those that tests share.
        """
        if self.shared and fleet is None:
            cls = type(self)
            if cls._started is None:
                cls._started = await _started(self.make())
            stage, cls._started = cls._started, None
            stage.sink.clear()
            try:
                yield stage
            except BaseException:  # the test may have left them in any state
                await stage.stop()
                raise
            cls._started = stage
        else:
            stage = await _started(self.make() if fleet is None else fleet, most)
            try:
                yield stage
            finally:
                await stage.stop()

    def _play(self, story: Coroutine[Any, Any, None]) -> None:
        cls = type(self)
        if self.shared:
            cls._loop = cls._loop or asyncio.new_event_loop()
        run_within(self.patience_s, story, "an answer", cls._loop)


class _Sink:
    """Writes down what engines say: outputs, or reasons where a chunk was given back."""

    def __init__(self) -> None:
        self.answers: dict[str, list[ChunkOutput | str]] = defaultdict(list)
        self.pieces: dict[str, list[ChunkPiece]] = defaultdict(list)
        self.losses: list[str] = []
        self.changed = asyncio.Event()
        self.calling: str | None = None

    def clear(self) -> None:
        """Drop all records."""
        self.answers.clear()
        self.pieces.clear()
        self.losses.clear()

    def chunk_finished(self, instance_id: str, output: ChunkOutput) -> None:
        self._answer(output.job_id, output)

    def chunk_failed(self, instance_id: str, job_id: str, reason: str) -> None:
        self._answer(job_id, reason)

    def chunk_streamed(self, instance_id: str, piece: ChunkPiece) -> None:
        assert not self.answers[piece.job_id], f"sent a piece of {piece.job_id!r} after its answer"
        self.pieces[piece.job_id].append(piece)
        self.changed.set()

    def reported(self, report: InstanceReported) -> None:
        self.changed.set()

    def degraded(self, degradation: InstanceDegraded) -> None:
        self.changed.set()

    def lost(self, instance_id: str, reason: str) -> None:
        self.losses.append(f"{instance_id}: {reason}")
        self.changed.set()

    def leaving(self, instance_id: str, reason: str) -> None:
        self.changed.set()

    def _answer(self, job_id: str, answer: ChunkOutput | str) -> None:
        assert self.calling is None, f"called the sink from within {self.calling}()"
        self.answers[job_id].append(answer)
        self.changed.set()


class _Stage:
    """Started engines, and a sink."""

    def __init__(self, fleet: EngineFleet) -> None:
        self.fleet = fleet
        self.sink = _Sink()
        self.infos: list[InstanceInfo] = []
        self.version = 0

    def job(
        self,
        seed: int,
        *,
        name: str | None = None,
        prompt: int = 12,
        generated: Sequence[int] = (),
        max_tokens: int = 12,
        streams: bool = False,
        may_end_early: bool = False,
    ) -> ChunkJob:
        """Return a chunk of the response with this seed, by the latest weights."""
        vocabulary = self.fleet.model.vocab_size
        tokens = [(7 * place + 3 + 11 * seed) % vocabulary for place in range(prompt)]
        return ChunkJob(
            id=name or f"chunk {seed}",
            request_id=f"r{seed}",
            group_id=f"g{seed}",
            token_ids=[*tokens, *generated],
            prompt_tokens=prompt,
            max_tokens=max_tokens,
            sampling=Sampling(),
            seed=seed,
            weight_version=self.version,
            known_tokens=TOKENS,
            streams=streams,
            may_end_early=may_end_early,
        )

    def submit(self, job: ChunkJob, on: int = 0) -> None:
        self.sink.calling = "submit"
        self.fleet.engines[on].submit(job)
        self.sink.calling = None

    def abort(self, job_id: str, on: int = 0) -> None:
        self.sink.calling = "abort"
        self.fleet.engines[on].abort(job_id)
        self.sink.calling = None

    async def update(self, weights: str, version: int | None = None) -> None:
        """Have all engines that run load other weights, as this version or the next."""
        self.version = self.version + 1 if version is None else version
        for engine in self.fleet.engines[: len(self.infos)]:
            await engine.update_weights(directory(weights), self.version)

    async def start_again(self, weights: str) -> None:
        """Start the first engine, which was stopped, with the weights that the others have."""
        await self.fleet.engines[0].start(self.sink)
        if self.version:
            await self.fleet.engines[0].update_weights(directory(weights), self.version)

    async def stop(self) -> None:
        """Stop all engines."""
        await asyncio.gather(*(engine.stop() for engine in self.fleet.engines))

    async def answered(self, jobs: Sequence[ChunkJob]) -> None:
        """Wait until each of these has an answer."""
        while missing := [job.id for job in jobs if not self.sink.answers[job.id]]:
            self.sink.changed.clear()
            moves = await self.fleet.clock.advance(self.sink.changed)
            assert moves, f"chunks {missing} are unanswered and no engine will ever speak"
            assert not self.sink.losses, f"an instance died: {self.sink.losses}"

    async def run(self, jobs: Sequence[ChunkJob], on: int = 0) -> list[ChunkOutput]:
        """Have these run and return what came of them."""
        for job in jobs:
            self.submit(job, on)
        await self.answered(jobs)
        return [self.output(job) for job in jobs]

    def output(self, job: ChunkJob) -> ChunkOutput:
        """Return what came of a chunk that has been answered."""
        answer = self.sink.answers[job.id][0]
        assert isinstance(answer, ChunkOutput), f"gave chunk {job.id!r} back: {answer}"
        return answer


async def _started(fleet: EngineFleet, most: int | None = None) -> _Stage:
    """Start the engines of a fleet, at ``most`` so many, with neither drafter nor pool.

    Stop them if one does not start.
    """
    stage = _Stage(fleet)
    for engine in fleet.engines:
        engine.set_drafter(None)
        engine.set_kv_pool(None)
    try:
        starts = [engine.start(stage.sink) for engine in fleet.engines[:most]]
        stage.infos += await asyncio.gather(*starts)
    except BaseException:
        await stage.stop()
        raise
    return stage


async def _refused(call: Coroutine[Any, Any, Any]) -> bool:
    """Return whether a call raises an ``EngineError``."""
    try:
        await call
    except EngineError:
        return True
    return False


def _check_account(job: ChunkJob, output: ChunkOutput, vocabulary: int) -> None:
    tokens = len(output.token_ids)
    assert output.job_id == job.id
    assert 0 <= tokens <= job.max_tokens
    assert output.stopped or job.may_end_early or tokens == job.max_tokens, "neither stopped nor full"
    assert all(0 <= token < vocabulary for token in output.token_ids)
    assert len(output.logprobs) == tokens
    assert all(isfinite(logprob) and logprob <= 0 for logprob in output.logprobs)
    assert output.weight_version == job.weight_version
    counts = (output.cached_tokens, output.pool_tokens, output.prefilled_tokens, output.preemptions)
    assert min(counts) >= 0
    found = output.cached_tokens + output.pool_tokens + output.prefilled_tokens
    assert found == len(job.token_ids), (
        f"cached, pooled and prefilled are {counts[:3]} of {len(job.token_ids)}"
    )
    assert output.prefilled_tokens >= 1, "the last token is always computed"
    assert output.computed_tokens >= output.prefilled_tokens + tokens - 1
    assert output.steps == 0 or output.steps <= tokens
    assert len(output.drafted_at) == len(output.accepted_at)
    assert all(a <= d for a, d in zip(output.accepted_at, output.drafted_at, strict=True))
