"""verl's client of its own servers, whose requests Seer's scheduler divides and places.

Where Seer fails or does not answer, a request goes on as verl's own client would have sent it, with the
tokens so far behind its prompt.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import pickle
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary

import ray
from verl.utils import normalize_token_ids
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from seer_verl.fallbacks import add_fallbacks
from seer_verl.merging import merged_output
from seer_verl.rows import ROW, BatchRow
from seer_verl.sampling import CONTROLS, LEAST, record_fields
from seer_verl.scheduler import RowJob, RowScheduler, config_of
from seer_verl.scheduler_process import SchedulerProcess, end_process, process_of
from seer_verl.settings import KeptSettings, kept_settings_of
from seer_verl.tracking import log_with

__all__ = ["KeptClient", "handles_of"]

logger = logging.getLogger("seer")

FIGURES_S = 10.0
"""How long verl's log of a step waits for Seer's figures; a scheduler is hung that takes longer."""

REPLACED_S = 1.0
"""How often a scheduler is asked that Ray is about to replace."""

MOST_TRIES = 64
"""How often each server is looked for: a balancer that goes by a hash may name one several times."""


class KeptClient(LLMServerClient):
    """Asks Seer's scheduler, an actor, for the turns of rows; ``super().generate`` is verl's own way.

    It is passed to every worker of agent loops; they have one count of fallbacks.
    """

    def __init__(self, config: Any, stock: LLMServerClient) -> None:
        """Start the scheduler over the servers of verl's own client."""
        balancer = stock._load_balancer
        super().__init__(config, balancer)
        rollout = config.actor_rollout_ref.rollout
        settings = kept_settings_of(rollout)
        self.settings: KeptSettings = settings
        config_of(self.settings)  # what is wrong with it is an error now, and not a dead actor later
        self.usual_agent: str = rollout.agent.default_agent_loop
        self._logged = False
        self._opened = False
        self._process: SchedulerProcess | None = None
        self._under_way: dict[str, _Turn] = {}
        self._stored: WeakValueDictionary[str, _Stored] = WeakValueDictionary()
        self._watching: asyncio.Task[None] | None = None
        actor = ray.remote(num_cpus=0, max_concurrency=1 << 16, max_restarts=-1)(RowScheduler)
        self.scheduler: Any = actor.remote(handles_of(balancer), rollout.name, self.settings)
        log_with(self._figures)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_stored"} | {
            "_under_way": {},
            "_watching": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= {**state, "_stored": WeakValueDictionary()}

    def _figures(self) -> dict[str, float]:
        """Return the figures of the last step; the fallbacks alone where Seer does not answer at once."""
        try:
            found: dict[str, float] = ray.get(self.scheduler.metrics.remote(), timeout=FIGURES_S)
        except ray.exceptions.RayError:
            found = {"seer/unreachable": 1.0}
        with suppress(ray.exceptions.RayError):
            found = {**found, "seer/fallbacks": float(ray.get(self._count(0), timeout=FIGURES_S))}
        return found

    def _count(self, fallbacks: int, most: int | None = None) -> Any:
        """Have verl's balancer count fallbacks of the run; see ``add_fallbacks``."""
        return self._load_balancer.__ray_call__.remote(add_fallbacks, fallbacks, most)

    async def _count_row(self, row: BatchRow, reason: str, kept_up_to: int | None) -> None:
        """Count the first turn of a response that is written without Seer.

        Raises:
            RuntimeError: there are more such responses than the run may have.
        """
        if row.without:
            return
        row.without = True
        most = self.settings.most_fallbacks
        if await self._count(1, kept_up_to) > most:
            raise RuntimeError(
                f"Seer has failed, and {most} responses of this run may be written without it"
                f" (engine_kwargs.seer.most_fallbacks): {reason}"
            )

    # Batches.

    @asynccontextmanager
    async def reserved(self, groups: Sequence[Mapping[str, Any]], iteration: int) -> Any:
        """Open a batch of groups, records with ``group_id`` and ``n``, and close it.

        Where Seer is hung it is started anew; where it is not to be had, the batch is rolled out without it.
        """
        batch = uuid4().hex
        names = [(str(each["group_id"]), int(each["n"])) for each in groups]
        opened = await self._open(batch, names, iteration)
        try:
            yield batch if opened else ""
        finally:
            if opened:
                with suppress(Exception):  # such as that of a scheduler that died meanwhile
                    await self._close(batch)

    async def _open(self, batch: str, groups: Sequence[tuple[str, int]], iteration: int) -> bool:
        reason = ""
        for _ in range(2):
            try:
                async with asyncio.timeout(self.settings.wait_s):
                    await self._begin(batch, groups, iteration)
                    self._process = await self.scheduler.__ray_call__.remote(process_of)
                self._opened = True
                return True
            except ray.exceptions.RayActorError as error:  # its next life is tried
                reason = str(error)
            except ray.exceptions.RayTaskError as error:
                if not self._opened:  # such as servers that are less exact than is required
                    raise
                reason = str(error)
            except TimeoutError:
                reason = f"it does not answer within {self.settings.wait_s:g} s"
                await self._start_anew()
        logger.error("Seer cannot begin a batch, which is rolled out without it: %s", reason)
        return False

    async def _begin(self, batch: str, groups: Sequence[tuple[str, int]], iteration: int) -> None:
        while True:
            with suppress(ray.exceptions.ActorUnavailableError):
                await self.scheduler.begin.remote(batch, groups, iteration)
                return
            await asyncio.sleep(REPLACED_S)

    async def _close(self, batch: str) -> None:
        """End a batch; a scheduler that answers meanwhile only waits for its servers to be free."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.settings.wait_s):
                await self.scheduler.end.remote(batch)
                return
        try:
            async with asyncio.timeout(FIGURES_S):
                await self.scheduler.metrics.remote()
        except TimeoutError:
            await self._start_anew()

    async def _start_anew(self) -> None:
        """Have Ray start the scheduler anew, which is hung."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ray.exceptions.RayError, TimeoutError):
                async with asyncio.timeout(self.settings.wait_s):
                    return await end_process(process)
        ray.kill(self.scheduler, no_restart=False)

    # Requests.

    @rollout_trace_op
    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        **more: Any,
    ) -> TokenOutput:
        """Return the next turn of the row that runs, as verl's client does; see its method."""
        prompt = list(normalize_token_ids(prompt_ids))
        row = ROW.get() or BatchRow(request_id, 0, 0)
        arguments = self._arguments(more)
        turn = _Turn(self._job(row, prompt, sampling_params, arguments), arguments)
        row.turns += 1
        if not row.batch:
            reason = "no batch is open with it"
            return await self._without(row, turn, reason, request_id, prompt, sampling_params, more)
        self._watch(turn)
        reason = ""
        try:
            answer = asyncio.ensure_future(_answer(self.scheduler.generate.remote(turn.job)))
            failed = asyncio.ensure_future(turn.failed.wait())
            try:
                await asyncio.wait([answer, failed], return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                self.scheduler.abandon.remote(turn.job)
                raise
            finally:
                failed.cancel()
                if not answer.done():
                    answer.cancel()
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                found = answer.result()
                if found["extra_fields"]["seer_fallback"]:  # of all lives of the scheduler
                    await self._count_row(row, "its scheduler has had some written, too", None)
                if not sampling_params.get("logprobs"):
                    found["log_probs"] = None
                return TokenOutput(**found)
            reason = turn.reason or (str(answer.exception()) if answer.done() else "")
        finally:
            self._under_way.pop(turn.name, None)
        return await self._without(row, turn, reason, request_id, prompt, sampling_params, more)

    def _job(
        self,
        row: BatchRow,
        prompt: list[int],
        sampling_params: Mapping[str, Any],
        arguments: Mapping[str, Any],
    ) -> RowJob:
        rollout = self.config.actor_rollout_ref.rollout
        room = min(rollout.response_length, rollout.prompt_length + rollout.response_length - len(prompt))
        fields, left = record_fields(sampling_params, room, CONTROLS[rollout.name])
        most = fields["max_tokens"]
        if rollout.max_model_len is not None:
            most = min(most, rollout.max_model_len - len(prompt))
        fields |= {"max_tokens": max(1, most)}
        fields.setdefault("ignore_eos", bool(rollout.get("ignore_eos", False)))
        return RowJob(
            batch=row.batch,
            group=row.group,
            index=row.index,
            turn=row.turns,
            prompt_token_ids=prompt,
            fields=fields,
            arguments={
                name: [value.reference if isinstance(value, _Stored) else value]
                for name, value in arguments.items()
            },
            sampling_params=left,
            iteration=row.iteration,
        )

    def _arguments(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """Return the further arguments of a server's ``generate``, as verl's client passes them on.

        What is large is put into Ray's store, and passes by the scheduler as a reference.
        """
        given = dict(more)
        features = given.pop("mm_processor_output", None)
        if self.config.actor_rollout_ref.rollout.name == "sglang":
            given["video_data"] = features
            given.pop("priority", None)
        elif not given.get("priority"):
            given.pop("priority", None)
        if not given.get("mm_processor_kwargs"):
            given.pop("mm_processor_kwargs", None)
        found = {name: value for name, value in given.items() if value is not None}
        media = ("image_data", "video_data", "audio_data")
        return {name: self._put(value) if name in media else value for name, value in found.items()}

    def _put(self, value: Any) -> _Stored:
        """Put a value into Ray's store, once for all turns under way that have it, as those of a group do."""
        name = hashlib.sha256(pickle.dumps(value)).hexdigest()
        found = self._stored.get(name)
        if found is None:
            found = self._stored[name] = _Stored(ray.put(value))
        return found

    # Without Seer.

    async def _without(
        self,
        row: BatchRow,
        turn: _Turn,
        reason: str,
        request_id: str,
        prompt: list[int],
        sampling_params: Mapping[str, Any],
        more: Mapping[str, Any],
    ) -> TokenOutput:
        """Go on as verl's own client, behind the tokens so far if its weights are still the same."""
        await self._count_row(row, reason, self.settings.most_fallbacks)
        if not self._logged:
            self._logged = True
            logger.error("Seer has failed; responses go on by verl's own client: %s", reason)
        tokens, logprobs = turn.tokens, turn.logprobs
        length = turn.job.fields["max_tokens"]
        output = None
        if len(tokens) < length:
            how = {**sampling_params, "max_tokens": length - len(tokens)}
            how |= {name: max(0, how[name] - len(tokens)) for name in LEAST if how.get(name)}
            output = await super().generate(
                request_id, prompt_ids=[*prompt, *tokens], sampling_params=how, **more
            )
            if tokens and str(output.extra_fields.get("global_steps")) != turn.label:
                # No response has tokens of two versions of the weights.
                tokens, logprobs = [], []
                how = {**sampling_params, "max_tokens": length}
                output = await super().generate(request_id, prompt_ids=prompt, sampling_params=how, **more)
        last = {} if output is None else output.model_dump()
        merged = merged_output(
            [*tokens, *last.get("token_ids", ())],
            [*logprobs, *(last.get("log_probs") or ())],
            [last] if last else [],
            stop=last.get("stop_reason") or "completed",
        )
        if not sampling_params.get("logprobs"):
            merged["log_probs"] = None
        merged["extra_fields"]["seer_fallback"] = True
        return TokenOutput(**merged)

    def _watch(self, turn: _Turn) -> None:
        self._under_way[turn.name] = turn
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._look())

    async def _look(self) -> None:
        """Ask for the tokens so far while turns are under way; an answer that does not come ends them all."""
        while self._under_way:
            await asyncio.sleep(self.settings.look_s)
            wanted = {name: len(turn.tokens) for name, turn in self._under_way.items()}
            try:
                async with asyncio.timeout(self.settings.stall_s):
                    found = await self.scheduler.progress.remote(wanted)
            except Exception as error:
                if isinstance(error, TimeoutError):
                    error = TimeoutError(f"it does not answer within {self.settings.stall_s:g} s")
                for turn in self._under_way.values():
                    turn.reason = str(error)
                    turn.failed.set()
                return
            for name, (tokens, logprobs) in found["written"].items():
                if (known := self._under_way.get(name)) is not None:
                    known.tokens += tokens
                    known.logprobs += logprobs
                    known.label = found["label"]


class _Stored:
    """A value in Ray's store, which stays there as long as this."""

    def __init__(self, reference: Any) -> None:
        self.reference = reference


class _Turn:
    """A turn under way: its tokens so far, and whether Seer has failed at it."""

    def __init__(self, job: RowJob, arguments: Mapping[str, Any]) -> None:
        self.job, self._arguments = job, arguments
        self.name = job.request_id
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.label = ""
        self.reason = ""
        self.failed = asyncio.Event()


async def _answer(reference: Any) -> dict[str, Any]:
    found: dict[str, Any] = await reference
    return found


def handles_of(balancer: Any) -> dict[str, Any]:
    """Return the servers of verl's balancer of requests, by their addresses.

    Raises:
        RuntimeError: it does not hand all of them out.
    """
    names = ray.get(balancer.get_all_servers.remote())
    found: dict[str, Any] = {}
    taken = []
    for number in range(MOST_TRIES * len(names)):
        if len(found) == len(names):
            break
        name, handle = ray.get(balancer.acquire_server.remote(request_id=f"seer-{number}"))
        taken.append(name)
        found[name] = handle
    ray.get([balancer.release_server.remote(server_id=name) for name in taken])
    if not found or len(found) < len(names):
        raise RuntimeError(
            f"verl's balancer of requests hands out {len(found)} of its {len(names)} servers; without"
            " rollout.router_config_path it hands out all"
        )
    return {name: found[name] for name in names}
