"""Responses without the scheduler: each is written by one server, whole or from where it was.

They serve where the scheduler has failed or stalls, and to compare: a canary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Protocol, runtime_checkable

import attrs
import structlog
from seer_host.text import text_before_stop
from seer_session.runtime import Runtime

from seer_core.errors import EngineError
from seer_core.model import Completion, PromptGroup
from seer_core.model.arrays import Logprobs, Tokens
from seer_core.model.chunks import ChunkJob, ChunkOutput
from seer_core.model.requests import ChunkRecord, FinishReason

__all__ = ["Canary", "DirectWriter", "WritingEngine", "aborted"]

log = structlog.get_logger("seer")


@runtime_checkable
class WritingEngine(Protocol):
    """The further method of an ``InstanceClient`` that writes beside the scheduler."""

    id: str

    async def write(self, job: ChunkJob) -> ChunkOutput:
        """Have a chunk written that the scheduler has not sent.

        Raises:
            EngineError: the instance is down, or cannot write it.
        """
        ...


class DirectWriter:
    """Has servers write responses, one after the other in turn.

    ``most`` responses of a run are written so in place of the scheduler.
    """

    def __init__(self, runtime: Callable[[], Runtime], most: int) -> None:
        self._runtime = runtime
        self._most = most
        self.replaced = 0
        """Responses that were written in place of the scheduler."""
        self._turns = count()
        self._logged = False

    @property
    def able(self) -> bool:
        """Whether there is a server that can write, and the limit of the run is not reached."""
        return self.replaced < self._most and bool(self._engines)

    @property
    def _engines(self) -> list[WritingEngine]:
        runtime = self._runtime()
        up = (runtime.engines[name] for name in runtime.alive)
        return [each for each in up if isinstance(each, WritingEngine)]

    async def go_on(
        self,
        groups: Sequence[PromptGroup],
        found: Mapping[str, Completion],
        so_far: Callable[[str], tuple[Sequence[int], Sequence[float]]],
        reason: str,
        under_way: dict[str, asyncio.Task[Completion]],
    ) -> dict[str, Completion]:
        """Return the responses of groups that are not ``found``, written on from the tokens ``so_far``.

        A response whose task ``under_way`` is cancelled is aborted.

        Raises:
            EngineError: no server can, or the limit of the run is reached.
        """
        wanted = [(group, i) for group in groups for i in range(group.n) if f"{group.id}/{i}" not in found]
        if self.replaced + len(wanted) > self._most:
            raise EngineError(
                f"the scheduler has failed, and {self._most} responses of this run were written without it:"
                f" {reason}"
            )
        self.replaced += len(wanted)
        if not self._logged:
            self._logged = True
            log.error("written_without_scheduler", reason=reason, most=self._most)
        for group, i in wanted:
            name = f"{group.id}/{i}"
            under_way[name] = asyncio.create_task(self.write(group, i, *so_far(name)))
        try:
            over, _ = await asyncio.wait(under_way.values(), return_when=asyncio.FIRST_EXCEPTION)
            answers = {
                each.request_id: each for each in (task.result() for task in over if not task.cancelled())
            }
            lacking = ((group, i) for group, i in wanted if f"{group.id}/{i}" not in answers)
            runtime = self._runtime()
            left = [aborted(runtime, group, i, *so_far(f"{group.id}/{i}")) for group, i in lacking]
            return answers | {each.request_id: each for each in left}
        finally:
            for task in under_way.values():
                task.cancel()
            await asyncio.gather(*under_way.values(), return_exceptions=True)
            under_way.clear()

    async def write(
        self,
        group: PromptGroup,
        index: int,
        tokens: Sequence[int] = (),
        logprobs: Sequence[float] = (),
    ) -> Completion:
        """Return a response that one server has written, behind the tokens that it has.

        Raises:
            EngineError: none can.
        """
        failure: EngineError | None = None
        for _ in range(max(1, len(self._engines))):
            engines = self._engines
            if not engines:
                break
            engine = engines[next(self._turns) % len(engines)]
            try:
                return await self._written(engine, group, index, tokens, logprobs)
            except EngineError as error:
                failure = error
        raise failure or EngineError("no server is there that could write the response")

    async def _written(
        self,
        engine: WritingEngine,
        group: PromptGroup,
        index: int,
        tokens: Sequence[int],
        logprobs: Sequence[float],
    ) -> Completion:
        runtime, request_id = self._runtime(), f"{group.id}/{index}"
        seed, context = group.seed_of(index), [*group.prompt_token_ids, *tokens]
        how, began_s = group.sampling, runtime.clock.now()
        if how.top_logprobs or how.prompt_logprobs is not None:
            tokens = logprobs = ()  # those of the tokens so far are not at hand
            context = [*group.prompt_token_ids]
        chunks: list[ChunkRecord] = []
        tops = of_prompt = None
        all_tokens, all_logprobs, stopped = [*tokens], [*logprobs], False
        if len(all_tokens) < group.max_tokens:
            job = ChunkJob(
                f"direct-{next(self._turns)}",
                request_id,
                group.id,
                context,
                len(group.prompt_token_ids),
                group.max_tokens - len(tokens),
                group.sampling,
                seed,
                runtime.weight_version,
                last=True,
                attachments=group.attachments,
            )
            output = await engine.write(job)
            all_tokens += output.token_ids
            all_logprobs += output.logprobs
            stopped, tops, of_prompt = output.stopped, output.top_logprobs, output.prompt_logprobs
            chunks.append(
                ChunkRecord(
                    engine.id,
                    len(output.token_ids),
                    began_s,
                    runtime.clock.now(),
                    output.cached_tokens,
                    output.prefilled_tokens,
                    0,
                    output.preemptions,
                    output.weight_version,
                    attachments=output.attachments,
                )
            )
        return _completion(
            runtime,
            group,
            index,
            all_tokens,
            all_logprobs,
            "stop" if stopped else "length",
            chunks=chunks,
            instances=[engine.id],
            top_logprobs=tops,
            prompt_logprobs=of_prompt,
        )


def aborted(
    runtime: Runtime,
    group: PromptGroup,
    index: int,
    tokens: Sequence[int] = (),
    logprobs: Sequence[float] = (),
) -> Completion:
    """Return a response that was aborted when it had these tokens."""
    return _completion(runtime, group, index, tokens, logprobs, "aborted", chunks=[], instances=[])


def _completion(
    runtime: Runtime,
    group: PromptGroup,
    index: int,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    reason: FinishReason,
    **further: Any,
) -> Completion:
    """Return a response that is over now; ``further`` are fields of it."""
    decode = None if runtime.tokenizer is None else runtime.tokenizer.decode
    ending = text_before_stop(decode, group.sampling, group.prompt_token_ids, tokens, reason == "stop")
    return Completion(
        request_id=f"{group.id}/{index}",
        group_id=group.id,
        index=index,
        seed=group.seed_of(index),
        token_ids=Tokens(tokens),
        logprobs=Logprobs(logprobs),
        text=ending.text,
        finish_reason=reason,
        weight_version=runtime.weight_version,
        finished_s=runtime.clock.now(),
        metadata=group.metadata,
        stop_reason=ending.stop_reason,
        **further,
    )


@attrs.define(eq=False)
class Canary:
    """Has ``each_step`` responses of each version of the weights written again, whole on one server; or of
    each step, where its owner names those.

    ``compared`` counts them, ``different`` those whose tokens were not the same.  After ``stop_after``
    different ones the scheduler is not used any more.
    """

    writer: DirectWriter
    each_step: int
    stop_after: int
    compared: int = 0
    different: int = 0
    failed: int = 0
    _version: int = -1
    _left: int = 0
    _tasks: set[asyncio.Task[None]] = attrs.Factory(set)

    @property
    def stopped(self) -> bool:
        """Whether so many responses differed that the scheduler is not used any more."""
        return bool(self.stop_after) and self.different >= self.stop_after

    def begin_step(self) -> None:
        """Compare as many responses again, though the weights may be the same."""
        self._version = -1

    def look(self, group: PromptGroup, completion: Completion) -> None:
        """Compare a response, if its turn has come."""
        if completion.weight_version != self._version:
            self._version, self._left = completion.weight_version, self.each_step
        if self._left < 1 or not completion.whole:
            return
        self._left -= 1
        task = asyncio.create_task(self._compare(group, completion))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def failure(self) -> EngineError:
        """The error of requests that would be scheduled all the same."""
        return EngineError(
            f"responses under the scheduler differ from those without it, {self.different} of"
            f" {self.compared}; look into the log, and start the server anew"
        )

    async def over(self, wait_s: float) -> None:
        """Wait until no response is compared any more, before weights change for example.

        After so many seconds those that are left are not compared, as on servers that are paused.
        """
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=max(0.0, wait_s))
        self.failed += len(late)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    def close(self) -> None:
        """Compare no more."""
        for task in self._tasks:
            task.cancel()

    async def _compare(self, group: PromptGroup, completion: Completion) -> None:
        try:
            again = await self.writer.write(group, completion.index)
        except EngineError as error:
            self.failed += 1
            log.warning("canary_failed", request=completion.request_id, error=str(error))
            return
        self.compared += 1
        mine, theirs = list(completion.token_ids), list(again.token_ids)
        if mine == theirs:
            return
        self.different += 1
        pairs = enumerate(zip(mine, theirs, strict=False))
        place = next((i for i, (one, other) in pairs if one != other), min(len(mine), len(theirs)))
        log.error(
            "canary_differs",
            request=completion.request_id,
            place=place,
            instances=list(completion.instances),
            alone=again.instances[0],
            stopped=self.stopped,
        )
