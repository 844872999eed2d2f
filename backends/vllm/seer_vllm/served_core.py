"""Seer's half in the engine of a stock ``vllm serve``: it obeys the calls that come over ``served_routes``.

``install`` gives vLLM's engine core two methods, which are called between steps, and its workers those by
which KV is read and drafts are made.  Each call that may change the weights ends the sharing of KV: of a
worker's method that is not Seer's, sleep, waking, and a new label.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from importlib.metadata import entry_points
from time import perf_counter
from typing import Any

import msgspec
import structlog
from msgspec import structs
from seer_worker.process.degradation_log import DegradationLog
from seer_worker.process.place import node_name
from seer_worker.process.shared_blocks import SharedBlocks
from seer_worker.process.stores import STORE
from seer_worker.seer_version import seer_version
from seer_worker.served import (
    ENDS_EARLY,
    AddText,
    Attach,
    Detach,
    ServedAnswer,
    ServedCall,
    ServedInfo,
    ServedKv,
    ShareAs,
)
from seer_worker.wire import ForgetGroup, PoolMessage

from seer_core.errors import EngineError, SeerError
from seer_core.ports.drafting import DraftContext, SourceSpec
from seer_core.ports.kv import Bytes, KVStore, StoreContext, StoreSpec
from seer_vllm import GROUPED_DRAFTS, KEYED_SERVER
from seer_vllm.kv_groups import bytes_per_token
from seer_vllm.served_kv import FLAG, SeerConnector

__all__ = ["PROPOSER", "install"]

log = structlog.get_logger("seer")

PROPOSER = "seer_vllm.served_drafts.ServedProposer"
"""What ``--speculative-config`` names for the first model runner."""

DRAFTS_FLAG = (
    f'--speculative-config \'{{"method": "custom_class", "model": "{PROPOSER}",'
    ' "num_speculative_tokens": 8}\''
)
SECOND_DRAFTS = (
    f'{GROUPED_DRAFTS}=1 in its environment and --speculative-config \'{{"method": "ngram_gpu",'
    ' "num_speculative_tokens": 8}\''
)

HARMLESS = ("seer_", "compute_weight_checksums", "update_max_model_len", "profile")
"""Workers' methods, by their beginnings, that leave the weights as they are."""

CHANGES = ("sleep", "wake_up", "set_weight_version")

SOME_BLOCKS = 8
"""So many blocks are read to measure what a copy takes."""


class ServedEngine:
    """The engine core of a server, for one runtime at a time."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._config = core.vllm_config
        self._executor = core.model_executor
        connector = core.scheduler.connector
        self._connector = connector if isinstance(connector, SeerConnector) else None
        self._apart = type(self._executor).__name__ != "UniProcExecutor"
        self._driver = ""
        self._store: KVStore | None = None
        self._kv: ServedKv | None = None
        self._degradations = DegradationLog("kv_pool")
        self._drafts = False

    def info(self) -> ServedInfo:
        """Return what it can do as it was started."""
        config = self._config
        kv_lack, drafts_lack = self._kv_lack(), self._drafts_lack()
        return ServedInfo(
            seer_version(),
            node_name(),
            _keyed(),
            "second" if config.use_v2_model_runner else "first",
            None if kv_lack else self._described(0.0),
            kv_lack,
            0 if drafts_lack else config.speculative_config.num_speculative_tokens,
            drafts_lack,
            bool(self._driver),
        )

    def _kv_lack(self) -> str:
        parallel = self._config.parallel_config
        for name in ("pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size"):
            if getattr(parallel, name) > 1:
                return f"it shares no KV with {name} above 1"
        if self._connector is None:
            return f"start it with {FLAG}"
        if self._connector.groups.recurrent:
            return "it shares no KV of a model with recurrent layers"
        if self._apart and self._config.scheduler_config.async_scheduling:
            return "its workers are other processes: start it with --no-async-scheduling"
        return ""

    def _drafts_lack(self) -> str:
        config, second = self._config, self._config.use_v2_model_runner
        speculative = config.speculative_config
        if config.parallel_config.data_parallel_size > 1:
            return "it does not draft for Seer with data_parallel_size above 1"
        if not _keyed():
            return f"start it with {KEYED_SERVER}=1 in its environment"
        if second:
            drafts = os.environ.get(GROUPED_DRAFTS, "") in ("1", "true")
            if not drafts or speculative is None or speculative.method != "ngram_gpu":
                return f"start it with {SECOND_DRAFTS}"
            return ""
        if speculative is None or speculative.method != "custom_class" or speculative.model != PROPOSER:
            return f"start it with {DRAFTS_FLAG}"
        return ""

    def _described(self, fetch_s: float) -> ServedKv:
        connector = self._connector
        assert connector is not None
        parts = connector.parts
        token_bytes = bytes_per_token(self._core.scheduler.kv_cache_config) * parts.parts
        return ServedKv(connector.block_tokens, token_bytes, f"served-{parts.kind}", fetch_s)

    def obey(self, call: ServedCall) -> ServedAnswer:
        """Do what a call says, in its order; what cannot be done ends it."""
        try:
            for message in call.messages:
                if not isinstance(message, Attach) and call.driver != self._driver:
                    raise EngineError("it serves another run of Seer by now, or none")
                self._obey(call.driver, message)
        except SeerError as error:
            return ServedAnswer(rejection=str(error))
        return self._answer()

    def _obey(self, driver: str, message: Any) -> None:
        connector = self._connector
        if isinstance(message, Attach):
            self._attach(message)
            self._driver = driver
        elif isinstance(message, Detach):
            self._detach()
        elif isinstance(message, ShareAs):
            if connector is not None and self._store is not None:
                [order, *_] = self._executor.collective_rpc("seer_kv_order")
                connector.share(f"{message.weights} {order}")
        elif isinstance(message, ForgetGroup):
            if connector is not None:
                connector.requests.forget_group(message.group_id)
            self._draft("forget", message.group_id)
        elif isinstance(message, AddText):
            self._draft("add_sibling_tokens", message.text())
        elif connector is not None:
            connector.requests.store.receive(message.note)

    def _answer(self) -> ServedAnswer:
        notes: list[Any] = self._degradations.take()
        seconds, figures = 0.0, {}
        if self._drafts:
            seconds, figures = self._draft("report")
            notes += self._draft("take_degradations")
        if self._connector is not None and self._store is not None:
            note = self._connector.requests.store.take_message()
            notes += [PoolMessage(note)] if note else []
        shares = self._connector is not None and self._connector.shares
        return ServedAnswer(None, self._kv, shares, notes, seconds, figures)

    # What it is attached to.

    def _attach(self, message: Attach) -> None:
        """Leave the runtime before, and serve this one.

        Raises:
            EngineError: it lacks what was asked for, or cannot make it.
        """
        self._detach()
        try:
            if message.store is not None:
                self._attach_store(message, message.store)
            if message.source is not None:
                self._attach_source(message, message.source)
        except Exception:
            self._detach()
            raise

    def _detach(self) -> None:
        self._driver = ""
        if self._connector is not None and self._store is not None:
            self._connector.share(None)
            self._connector.leave()
            self._store = self._kv = None
        if self._drafts:
            self._draft("detach")
            self._drafts = False

    def _attach_store(self, message: Attach, spec: StoreSpec) -> None:
        connector = self._connector
        if connector is None or self._kv_lack():
            raise EngineError(self._kv_lack())
        _expect_plugin(spec.path)
        self._degradations = DegradationLog("kv_pool")
        context = StoreContext(
            message.instance_id,
            connector.block_bytes,
            connector.block_tokens,
            self._degradations.report,
            node_name(),
            message.address,
        )
        self._store = STORE.make(spec.path, spec.settings, context)
        connector.apart = self._apart
        connector.attach(self._store, self._read, self._degradations.report, beside=True)
        self._kv = self._described(self._measure())

    def _attach_source(self, message: Attach, spec: SourceSpec) -> None:
        lack = self._drafts_lack()
        if lack:
            raise EngineError(lack)
        _expect_plugin(spec.path)
        config, scheduler = self._config, self._core.scheduler
        most = config.speculative_config.num_speculative_tokens
        spec = structs.replace(spec, draft_tokens=min(spec.draft_tokens, most))
        times = spec.step_times
        if times is None:
            times = self._rpc("seer_time_forward", spec.draft_tokens)[0]
        context = DraftContext(
            message.instance_id,
            config.scheduler_config.max_num_seqs,
            config.model_config.max_model_len,
            config.model_config.get_vocab_size(),
            spec.draft_tokens,
            times,
        )
        # Otherwise vLLM pads a request with drafts of no meaning, beyond the end of its chunk.
        scheduler.dynamic_sd_lookup = [most] * (scheduler.max_num_running_reqs + 1)
        self._rpc("seer_draft", "attach", spec, context)
        self._drafts = True

    def _measure(self) -> float:
        """Return the seconds to copy a token's KV out and in: twice those of reading it."""
        connector = self._connector
        assert connector is not None
        blocks = list(range(min(SOME_BLOCKS, self._config.cache_config.num_gpu_blocks)))
        self._read(blocks)
        begun = perf_counter()
        self._read(blocks)
        return 2 * (perf_counter() - begun) / (len(blocks) * connector.block_tokens)

    def _read(self, block_ids: list[int] | None) -> Bytes:
        """Return blocks, uint8 [n, block_bytes], each rank's part; a worker's staged ones with None."""
        if not self._apart:
            blocks: Bytes = self._rpc("seer_read_kv", block_ids)[0]
            return blocks
        assert block_ids is not None
        assert self._connector is not None
        shared = SharedBlocks(len(block_ids), self._connector.block_bytes)
        for rank, flaw in enumerate(self._rpc("seer_read_kv_part", block_ids, shared)):
            if flaw is not None:
                raise EngineError(f"rank {rank} cannot read its part of the KV: {flaw}")
        return shared.blocks

    def _draft(self, method: str, *arguments: Any) -> Any:
        return self._rpc("seer_draft", method, *arguments)[0] if self._drafts else None

    def _rpc(self, method: str, *arguments: Any) -> list[Any]:
        answers: list[Any] = self._executor.collective_rpc(method, args=arguments)
        return answers

    def weights_changed(self) -> None:
        """Share no KV until the runtime says which weights these are."""
        if self._connector is not None and self._connector.shares:
            log.info("kv_not_shared", why="the server's weights may have changed")
            self._connector.share(None)


def _keyed() -> bool:
    return os.environ.get(KEYED_SERVER, "") in ("1", "true")


def _expect_plugin(path: str) -> None:
    """Raise EngineError unless a class is of a package that brings a plug-in of Seer's."""
    package = path.partition(":")[0].partition(".")[0]
    plugins = {each.value.partition(":")[0].partition(".")[0] for each in entry_points(group="seer")}
    if package not in plugins:
        raise EngineError(
            f"the server has no plug-in {package!r}: install beside vLLM the distribution that the runtime"
            " has"
        )


def install() -> None:
    """Give vLLM's engine core and workers what Seer's routes call; for a process before it has any."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerBase

    _end_early(Scheduler)

    def served(core: Any) -> ServedEngine:
        if not hasattr(core, "_seer_served"):
            core._seer_served = ServedEngine(core)
        found: ServedEngine = core._seer_served
        return found

    def seer_info(self: Any) -> str:
        return msgspec.json.encode(served(self).info()).decode()

    def seer_call(self: Any, body: str) -> str:
        call = msgspec.json.decode(body, type=ServedCall)
        return msgspec.json.encode(served(self).obey(call)).decode()

    core_class: Any = EngineCore
    core_class.seer_info, core_class.seer_call = seer_info, seer_call
    for name in CHANGES:
        setattr(core_class, name, _noticed(getattr(core_class, name), lambda *_: True))
    core_class.collective_rpc = _noticed(
        core_class.collective_rpc, lambda method, *_: not str(method).startswith(HARMLESS)
    )
    worker_class: Any = WorkerBase
    for method in (seer_kv_order, seer_read_kv, seer_read_kv_part, seer_draft, seer_time_forward):
        setattr(worker_class, method.__name__, method)


def _end_early(scheduler_class: Any) -> None:
    """Have chunks that may end early do so where vLLM would preempt them."""
    from vllm.v1.request import RequestStatus

    from seer_vllm.early_ends import EarlyEnds

    preempt, update = scheduler_class._preempt_request, scheduler_class.update_from_output

    @wraps(preempt)
    def _preempt_request(self: Any, request: Any, *arguments: Any, **named: Any) -> None:
        params = request.sampling_params
        extra = (params.extra_args if params else None) or {}
        if not extra.get(ENDS_EARLY) or not request.num_output_tokens:
            preempt(self, request, *arguments, **named)
            return
        if not hasattr(self, "_seer_ends"):
            self._seer_ends = EarlyEnds(RequestStatus.FINISHED_ABORTED)
        self._seer_ends.end(self, request)

    @wraps(update)
    def update_from_output(self: Any, *arguments: Any, **named: Any) -> Any:
        outputs = update(self, *arguments, **named)
        if hasattr(self, "_seer_ends"):
            self._seer_ends.report(outputs)
        return outputs

    scheduler_class._preempt_request = _preempt_request
    scheduler_class.update_from_output = update_from_output


def _noticed(original: Any, changes: Callable[..., bool]) -> Any:
    @wraps(original)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        found = getattr(self, "_seer_served", None)
        given = arguments or tuple(named.values())[:1]
        if found is None or not changes(*given):
            return original(self, *arguments, **named)
        found.weights_changed()
        try:
            return original(self, *arguments, **named)
        finally:
            found.weights_changed()

    return call


# In the workers.


def seer_kv_order(self: Any) -> str:
    """Return a name of the order of KV within blocks."""
    from seer_vllm.extension import WorkerExtension

    return WorkerExtension.seer_kv_order(self)


def seer_read_kv(self: Any, block_ids: list[int] | None) -> Bytes:
    """Return blocks of KV, or without numbers those staged, uint8 [n, block_bytes]."""
    from seer_vllm.extension import WorkerExtension

    return WorkerExtension.seer_read_kv(self, block_ids)


def seer_read_kv_part(self: Any, block_ids: list[int], into: Bytes) -> str | None:
    """Write this rank's part of blocks into uint8 [n, block_bytes]; return why it cannot."""
    from seer_vllm.extension import WorkerExtension

    return WorkerExtension.seer_read_kv_part(self, block_ids, into)


def seer_draft(self: Any, method: str, *arguments: Any) -> Any:
    """Call a method of what drafts, whose source is in the first worker alone."""
    proposer = getattr(self.model_runner, "seer_proposer", None)
    if proposer is None:
        raise EngineError(f"nothing drafts for Seer in this server's worker: set {KEYED_SERVER}=1")
    return getattr(proposer, method)(*arguments) if self.rank == 0 or method != "attach" else None


def seer_time_forward(self: Any, draft_tokens: int) -> Any:
    """Return the times of the model's forward pass, as those of steps."""
    from seer_vllm.served_drafts import time_forward

    return time_forward(self.model_runner, draft_tokens)
