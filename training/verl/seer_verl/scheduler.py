"""The actor in which Seer schedules the rows of verl's batches over verl's own servers.

Workers of agent loops call it for each turn of a row; the groups of a batch are named to it beforehand.  The
servers, their weights, their sleep and their pauses are verl's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import msgspec
import structlog
from seer_host.config_files import Config, make_config, read_toml
from seer_server.broker import RolloutBroker, Subscription, Trust
from seer_session.results import Summary
from seer_session.runtime import Runtime

from seer_core.errors import ConfigError, EngineError, SeerError
from seer_core.model import Completion
from seer_core.ports.policy import Observer
from seer_verl.merging import merged_output
from seer_verl.rows import step_of
from seer_verl.sampling import STOPS
from seer_verl.servers import ANSWERS_S, ARGUMENTS, KNOWN, REPEATED, VerlServer, use
from seer_verl.settings import KeptSettings
from seer_verl.step_reports import StepReports

__all__ = ["RowJob", "RowScheduler", "config_of"]

log = structlog.get_logger("seer")

LEVELS = ("distributed", "reproducible", "exact")


@attrs.frozen
class RowJob:
    """A turn of a row, as a worker asks for it."""

    batch: str
    """The batch that it is of; empty for none."""
    group: str
    index: int
    turn: int
    """0 is the row's part of its group's prompt."""
    prompt_token_ids: Sequence[int]
    fields: Mapping[str, Any]
    """The further fields of a prompt's record: how is sampled, and ``max_tokens``."""
    arguments: Mapping[str, list[Any]]
    """Further arguments of verl's ``generate``, unread, each in a list of one."""
    sampling_params: Mapping[str, Any]
    """Sampling parameters that Seer has no name for, unread."""
    iteration: int = 0

    @property
    def name(self) -> str:
        """Names it where it is a group of its own."""
        return f"{self.group}-{self.index}-{self.turn}"

    @property
    def request_id(self) -> str:
        """Names it to its worker, whether it is a row of its group or a group of its own."""
        return f"{self.name}/0" if self.turn else f"{self.group}/{self.index}"

    @property
    def attachments(self) -> dict[str, Any]:
        """The attachments of its prompt."""
        found = {"arguments": dict(self.arguments), "sampling_params": dict(self.sampling_params)}
        return {ARGUMENTS: found} if self.arguments or self.sampling_params else {}


class _Answer(NamedTuple):
    """A response, and whether it was written without the scheduler."""

    completion: Completion
    without: bool


@attrs.define(eq=False)
class _OpenGroup:
    """A group of an open batch: its rows' answers, once one of them has brought the prompt."""

    name: str
    n: int
    record: dict[str, Any] | None = None
    answers: list[asyncio.Future[_Answer]] = attrs.Factory(list)


@attrs.define(eq=False)
class _Batch:
    """Groups that were named together."""

    groups: dict[str, _OpenGroup]
    rows: int
    collected: list[_OpenGroup] = attrs.Factory(list)
    """Groups that have their prompt, and wait for those of others."""
    timer: asyncio.TimerHandle | None = None
    subscriptions: list[Subscription] = attrs.Factory(list)
    tasks: list[asyncio.Task[None]] = attrs.Factory(list)


def config_of(settings: KeptSettings) -> Config:
    """Return Seer's configuration: that of ``settings.config``, or the default one, over verl's servers.

    Raises:
        ConfigError: it is none, or names engines.
    """
    tree: dict[str, Any] = {}
    place = Path()
    if settings.config is not None:
        path = Path(settings.config)
        tree, place = read_toml(path), path.parent
    seer = {"plugins": ["divided_rollout", "length_posterior"], **tree.get("seer", {})}
    if seer.setdefault("engine", "remote") != "remote":
        raise ConfigError(
            f"{settings.config} names engine {seer['engine']!r}, and the engines are verl's; leave it out, or"
            " set rollout.name=seer for engines of Seer's own"
        )
    remote = {
        "require": "distributed",
        "processed_logprobs": True,
        **tree.get("engine", {}).get("remote", {}),
    }
    remote["handles"] = "seer_verl.servers:handles"
    engines = {**tree.get("engine", {}), "remote": remote}
    return make_config(
        {**tree, "seer": seer, "engine": engines},
        base_dir=place,
        origin=settings.config or "Seer's defaults for verl",
    )


class RowScheduler:
    """Schedules rows over servers; an actor of Ray's, or an object where a test calls it.

    ``servers`` are verl's actors by address, of a ``kind``: ``vllm`` or ``sglang``.
    """

    def __init__(self, servers: Mapping[str, Any], kind: str, settings: KeptSettings) -> None:
        self._actors, self._kind, self._settings = dict(servers), kind, settings
        self._config = config_of(settings)
        self._stack = AsyncExitStack()
        self._broker: RolloutBroker | None = None
        self._servers: list[VerlServer] = []
        self._labels: list[str] = []
        self._turn = asyncio.Lock()
        self._batches: dict[str, _Batch] = {}
        self._alone: dict[str, str] = {}
        """The requests of turns that are groups of their own, by the names that workers have for them."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._metrics: dict[str, float] = {}
        self._reports = StepReports(settings.report) if settings.report else None
        self._step = ""
        """The step under way, by which its report is named."""

    # Life.

    async def begin(self, batch: str, groups: Sequence[tuple[str, int]], iteration: int) -> None:
        """Open a batch of groups, each with its size; the servers are awake, with weights of one step.

        A batch that is open stays as it is.

        Raises:
            SeerError: they are not, or Seer has failed.
        """
        async with self._turn:
            if batch in self._batches:
                return
            if self._broker is not None:
                await self._recover(self._broker)
            if self._broker is None:
                await self._start()
            await self._look_at_weights()
            rows = sum(n for _, n in groups)
            self._require().reserve(rows)
            self._batches[batch] = _Batch({name: _OpenGroup(name, n) for name, n in groups}, rows)
            step = step_of(name for name, _ in groups)
            if step != self._step:
                self._require().canary.begin_step()
            self._step = step

    async def end(self, batch: str) -> dict[str, float]:
        """Close a batch: rows that were never asked for are given up.  Returns the step's figures."""
        found = self._batches.pop(batch, None)
        broker = self._broker
        if found is None or broker is None:
            return self._metrics
        if found.timer is not None:
            found.timer.cancel()
        for task in found.tasks:
            task.cancel()
        for subscription in found.subscriptions:
            broker.unsubscribe(subscription)
        _fail(found.groups.values(), EngineError("the batch was closed before this row was over"))
        broker.release(found.rows)
        async with self._turn:
            if not self._batches:
                await self._rest()
        return self._metrics

    async def close(self) -> None:
        """Leave the servers alone."""
        broker, self._broker = self._broker, None
        if broker is not None:
            for task in self._tasks:
                task.cancel()
            with suppress(SeerError):
                await self._stack.aclose()

    def metrics(self) -> dict[str, float]:
        """Return the figures of the last step."""
        return self._metrics

    async def _start(self) -> None:
        self._servers = use(self._actors, self._kind)
        await self._require_known_parts()
        settings = self._settings
        trust = Trust(
            settings.most_fallbacks, settings.stall_s, settings.canary, settings.canary_stop, self._renew
        )
        seeing: list[Observer] = []
        if self._reports is not None:
            self._reports.begin_anew()
            seeing.append(self._reports)
        broker = await asyncio.to_thread(RolloutBroker, self._runtime, trust=trust, observers=seeing)
        self._labels = await self._ask_labels()
        await self._stack.enter_async_context(broker.runtime)
        await self._stack.enter_async_context(broker.serving())
        while broker.runtime.current is None:  # the first rollout opens with the loop's next turn
            await asyncio.sleep(0)
        self._broker = broker

    async def _require_known_parts(self) -> None:
        """Raise EngineError if a server lacks a part by its name; one that does not answer may come later."""
        asked = [
            asyncio.ensure_future(ask())
            for each in self._servers
            for ask in (each.facts, each.load, each.label)
        ]
        answered, _ = await asyncio.wait(asked, timeout=ANSWERS_S)
        for each in asked:
            each.cancel()
        for error in [each.exception() for each in answered]:
            if isinstance(error, AttributeError):
                raise EngineError(
                    f"verl's servers are not those of verl {KNOWN}, which is known to work:"
                    f" {str(error).splitlines()[-1]}"
                ) from error

    async def _recover(self, broker: RolloutBroker) -> None:
        """After a failure begin anew, with fresh strategies, or wholly where no server was left."""
        await broker.recover()
        try:
            broker.require_working()
        except SeerError as error:
            if self._batches:
                raise
            log.warning("seer_begins_anew", after=str(error))
            await self.close()

    def _runtime(self, observers: Sequence[Observer]) -> Runtime:
        runtime = Runtime.from_config(self._config, observers)
        runtime.refuse_environment("verl's own servers")
        return runtime

    async def _renew(self, runtime: Runtime, observers: Sequence[Observer]) -> None:
        if self._reports is not None:
            self._reports.begin_anew()
        await runtime.renew_strategies(self._config, observers)

    def _require(self) -> RolloutBroker:
        if self._broker is None:
            raise EngineError("no batch is open: Seer was started anew in the midst of one")
        return self._broker

    async def _ask_labels(self) -> list[str]:
        """Return the labels of the weights; servers that do not answer have that of the first that does."""
        answers = await asyncio.gather(*(each.label() for each in self._servers), return_exceptions=True)
        known = next((each for each in answers if isinstance(each, str)), "")
        return [each if isinstance(each, str) else known for each in answers]

    async def _look_at_weights(self) -> None:
        """Go on after a rest: with the weights that verl has loaded meanwhile."""
        broker = self._require()
        labels = await self._ask_labels()
        runtime = broker.runtime
        if not runtime.asleep and labels == self._labels:
            return
        async with broker.exclusive(self._settings.wait_s) as runtime:
            if runtime.asleep:
                await runtime.wake()
            if labels != self._labels:
                await runtime.weights_changed()
                self._labels = labels

    async def _rest(self) -> None:
        """Note the figures of a step, and leave the servers to verl until the next."""
        broker = self._require()
        summary = None
        if (rollout := broker.runtime.current) is not None:
            summary = rollout.result.summary
            self._note(summary)  # verl may log the step before its servers are free
        with suppress(SeerError):  # what has failed begins anew with the next batch
            async with broker.exclusive(self._settings.wait_s) as runtime:
                await runtime.sleep()
        if summary is not None:
            self._note(summary)  # with what the canary has found meanwhile
        if self._reports is not None:
            await self._reports.write(self._step, {} if summary is None else msgspec.to_builtins(summary))

    def _note(self, summary: Summary) -> None:
        broker = self._require()
        names = "requests tokens total_time_s tail_time_s throughput_tokens_per_s chunks migrations"
        names += " cached_tokens prefilled_tokens recomputed_tokens instances_lost"
        found = {f"seer/{name}": float(getattr(summary, name)) for name in names.split()}
        found["seer/exactness"] = float(LEVELS.index(summary.exactness))
        found["seer/fallbacks"] = float(broker.direct.replaced)
        if self._settings.canary:
            found["seer/canary_compared"] = float(broker.canary.compared)
            found["seer/canary_different"] = float(broker.canary.different)
        self._metrics = found

    # Rows.

    async def generate(self, job: RowJob) -> dict[str, Any]:
        """Return a turn of a row, in the fields of verl's ``TokenOutput``.

        Raises:
            SeerError: it cannot be written.
        """
        self._require()
        completion, without = await self._ask(job)
        if completion.finish_reason not in STOPS:
            raise EngineError(f"the response {completion.request_id} has failed")
        parts = [chunk.attachments for chunk in completion.chunks]
        repeated = completion.finish_reason == "stop" and parts and parts[-1].get("stop_reason") == REPEATED
        output = merged_output(
            completion.token_ids.tolist(),
            completion.logprobs.tolist(),
            parts,
            stop=REPEATED if repeated else STOPS[completion.finish_reason],
        )
        output["extra_fields"]["seer_fallback"] = without
        return output

    async def _ask(self, job: RowJob) -> _Answer:
        record = self._record(job)
        batch = self._batches.get(job.batch)
        group = None if batch is None or job.turn else batch.groups.get(job.group)
        if batch is None or group is None or (group.record is not None and _differ(record, group.record)):
            record = {**record, "group_id": job.name, "family": job.group}
            alone = _OpenGroup(job.name, 1, record, answers=_futures(1))
            self._alone[job.request_id] = f"{job.name}/0"
            try:
                self._submit([alone], job.iteration, batch)
                return await alone.answers[0]
            finally:
                self._alone.pop(job.request_id, None)
        if group.record is None:
            group.record = {**record, "group_id": group.name, "n": group.n}
            group.answers = _futures(group.n)
            self._collect(batch, group, job.iteration)
        return await asyncio.shield(group.answers[job.index])

    @staticmethod
    def _record(job: RowJob) -> dict[str, Any]:
        return {
            "prompt_token_ids": list(job.prompt_token_ids),
            "n": 1,
            "attachments": job.attachments,
            **job.fields,
        }

    def _collect(self, batch: _Batch, group: _OpenGroup, iteration: int) -> None:
        """Submit a group with the others of its batch, as far as their prompts come in time."""
        batch.collected.append(group)
        waiting = sum(each.record is None for each in batch.groups.values())
        submit = partial(self._submit_collected, batch, iteration)
        if not waiting:
            submit()
        elif batch.timer is None:
            batch.timer = asyncio.get_running_loop().call_later(self._settings.prompt_wait_s, submit)

    def _submit_collected(self, batch: _Batch, iteration: int) -> None:
        if batch.timer is not None:
            batch.timer.cancel()
            batch.timer = None
        collected, batch.collected = batch.collected, []
        self._submit(collected, iteration, batch)

    def _submit(self, groups: Sequence[_OpenGroup], iteration: int, batch: _Batch | None) -> None:
        """Add groups to the rollout; where one of them is refused, each by itself."""
        if not groups:
            return
        task = asyncio.get_running_loop().create_task(self._roll_out(groups, iteration, batch))
        if batch is not None:
            batch.tasks.append(task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _roll_out(self, groups: Sequence[_OpenGroup], iteration: int, batch: _Batch | None) -> None:
        broker = self._require()
        records = [each.record or {} for each in groups]
        try:
            if broker.without_scheduler:
                subscription = await broker.detached(records, streams=False)
            else:
                subscription = await broker.submit_text(records, streams=False, iteration=iteration)
        except SeerError as error:
            if len(groups) > 1:
                for each in groups:
                    self._submit([each], iteration, batch)
            else:
                _fail(groups, error)
            return
        if batch is not None:
            batch.subscriptions.append(subscription)
        await self._deliver(subscription, {each.name: each for each in groups})

    async def _deliver(self, subscription: Subscription, groups: Mapping[str, _OpenGroup]) -> None:
        """Hand each response to its row; where the scheduler fails, the rest is written without it."""
        found: dict[str, Completion] = {}
        left = sum(each.n for each in groups.values())
        try:
            while len(found) < left:
                update = await subscription.updates.get()
                more: Mapping[str, Completion] = {}
                if isinstance(update, Completion):
                    more = {update.request_id: update}
                elif isinstance(update, SeerError):
                    more = await self._require().go_on(subscription, found, update)
                found |= more
                for each in more.values():
                    answer = groups[each.group_id].answers[each.index]
                    if not answer.done():
                        answer.set_result(_Answer(each, isinstance(update, SeerError)))
        except SeerError as error:
            _fail(groups.values(), error)

    def abandon(self, job: RowJob) -> None:
        """Abort a turn that its worker does not want any more."""
        if self._broker is not None:
            self._broker.abort([], [self._alone.get(job.request_id, job.request_id)])

    def progress(self, wanted: Mapping[str, int]) -> dict[str, Any]:
        """Return what unfinished responses have, each from a place on, and the label of the weights.

        ``wanted`` are places by the ``request_id`` of jobs; answers are pairs of tokens and log-probs by the
        same names.
        """
        broker = self._require()
        rollout = broker.runtime.current
        found: dict[str, tuple[list[int], list[float]]] = {}
        for name, start in wanted.items():
            request_id = self._alone.get(name, name)
            if rollout is not None and request_id in rollout.unfinished:
                tokens, logprobs = rollout.written(request_id, start)
                if tokens:
                    found[name] = tokens.tolist(), logprobs.tolist()
        return {"written": found, "label": self._labels[0] if self._labels else ""}


def _futures(count: int) -> list[asyncio.Future[_Answer]]:
    return [asyncio.get_running_loop().create_future() for _ in range(count)]


def _fail(groups: Iterable[_OpenGroup], error: SeerError) -> None:
    for group in groups:
        for answer in group.answers:
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # a row that is never asked for is no loss


def _differ(record: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether a row asks for something else than its group: then it is one of its own."""
    names = {*record, *other} - {"n", "group_id", "attachments"}
    unread, others = (
        each["attachments"].get(ARGUMENTS, {}).get("sampling_params") or {} for each in (record, other)
    )
    return unread != others or any(record.get(name) != other.get(name) for name in names)
