"""One vLLM engine as Seer uses it: chunks in, finished chunks out, everything accounted for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import structlog
from msgspec import structs
from seer_host import checkpoint
from seer_host.instance import Refusal, Row
from seer_host.meters import CELL_S, MoveMeter, StepMeter, start_grid
from seer_host.stores import STORE
from seer_host.troubles import Troubles
from seer_host.wire import Failed, Finished, Start, Telemetry, Troubled
from vllm import EngineArgs, SamplingParams
from vllm.config import KVTransferConfig
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.llm_engine import LLMEngine

from seer_core.arrays import Logprobs, Tokens
from seer_core.drafting import DraftHost, SiblingText, SourceSpec, StepTimes
from seer_core.errors import EngineError
from seer_core.kv import KVStore, StoreHost, StoreSpec
from seer_core.model import InstanceInfo
from seer_core.ports import ChunkJob, ChunkOutput
from seer_core.weights import WeightSpec
from seer_vllm import internals, patches
from seer_vllm.bench import VllmBench
from seer_vllm.connector import StoreConnector
from seer_vllm.proposer import own_method, speculative_config
from seer_vllm.scheduler import AccountingScheduler

__all__ = ["Instance"]

log = structlog.get_logger("seer")

EXTENSION = "seer_vllm.extension.WorkerExtension"
SCHEDULER = "seer_vllm.scheduler.AccountingScheduler"
NOT_FINITE = (
    "its log-probs are no finite numbers; if that comes again, the model's values are too large for its dtype"
)
UNRESET = "vLLM could not reset its prefix cache"
KV_TRANSFER = KVTransferConfig(
    kv_connector="StoreConnector", kv_connector_module_path="seer_vllm.connector", kv_role="kv_both"
)


class _Running(NamedTuple):
    job: ChunkJob
    vllm_id: str


class Instance:
    """A vLLM engine with its core in this process, and the chunks it is working on."""

    def __init__(self, start: Start) -> None:
        internals.check_imports(on_cpu=current_platform.is_cpu())
        patches.install(Path(start.scratch))
        source = start.source
        args = EngineArgs(
            **start.settings,
            speculative_config=None if source is None else speculative_config(source),
            kv_transfer_config=None if start.store is None else KV_TRANSFER,
            worker_extension_cls=EXTENSION,
            scheduler_cls=SCHEDULER,
            async_scheduling=False,
            disable_log_stats=True,
        )
        if current_platform.is_cpu() and args.kv_cache_memory_bytes is None:
            raise ValueError("without kv_cache_bytes vLLM would take nearly all memory; set it")
        self._engine = LLMEngine.from_engine_args(args)
        internals.check_engine(self._engine)
        self._call("seer_install")
        assert isinstance(self._engine.engine_core, InprocClient)
        scheduler = self._engine.engine_core.engine_core.scheduler
        assert isinstance(scheduler, AccountingScheduler)
        internals.check_scheduler(scheduler)
        self._scheduler = scheduler
        self._running: dict[str, _Running] = {}
        self._weight_version = 0
        self._poisoned = False
        self._fingerprint_asleep = ""
        self._tensors = checkpoint.headers_of(self._engine.vllm_config.model_config.model)
        self._pool_troubles = Troubles("kv_pool")
        self._drafts = source is not None
        self._opens = source is not None and own_method(source) is None
        self.info = self._describe(start.instance_id)
        connector = scheduler.connector
        self._connector = connector if isinstance(connector, StoreConnector) else None
        self._store = None if start.store is None else self._share(start.store)
        self.info = structs.replace(self.info, **self._measure_moves())
        if source is not None and self._opens:
            self._attach(source)

    def submit(self, job: ChunkJob) -> None:
        """Queue a chunk."""
        try:
            params = self._sampling_params(job)
            prompt = tokens_input(job.token_ids, cache_salt=f"vllm-weights-{self._weight_version}")
            vllm_id = self._engine.add_request(job.id, prompt, params)
        except (VLLMClientError, ValueError) as error:
            raise Refusal(f"vLLM refuses the chunk: {error}") from error
        self._running[job.id] = _Running(job, vllm_id)
        if self._opens:
            self._call("seer_open", vllm_id, job)

    def abort(self, job_id: str) -> None:
        """Drop a running chunk."""
        running = self._running.pop(job_id)
        self._engine.abort_request([job_id])
        self._scheduler.settle(running.vllm_id)
        if self._opens:
            self._call("seer_close", [running.vllm_id])

    def step(self) -> list[Finished | Failed]:
        """Make one step; return the chunks it ended."""
        outputs = self._engine.step()
        ended = [output for output in outputs if isinstance(output, RequestOutput) and output.finished]
        if ended and self._opens:
            self._call("seer_close", [self._running[output.request_id].vllm_id for output in ended])
        results = [self._finish(output) for output in ended]
        if self._poisoned:
            results += self._cleanse()
        return results

    def written(self, job_id: str, start: int) -> tuple[list[int], list[float]]:
        """Return what a running chunk has written, which vLLM keeps until it hands out all of it."""
        state = self._engine.output_processor.request_states[self._running[job_id].vllm_id]
        assert state.detokenizer is not None
        assert state.logprobs_processor is not None
        logprobs = state.logprobs_processor.logprobs
        assert isinstance(logprobs, FlatLogprobs)
        return state.detokenizer.output_token_ids[start:], logprobs.logprobs[start:]

    def telemetry(self) -> Telemetry:
        """Return what vLLM is doing, and what its drafts cost."""
        running, waiting = self._scheduler.get_request_counts()
        drafting_s, drafting = self._call("seer_drafting")[0] if self._drafts else (0.0, {})
        kv_usage = self._scheduler.get_kv_cache_usage()
        return Telemetry(running, waiting, kv_usage, drafting_s=drafting_s, drafting=drafting)

    def troubles(self) -> list[Troubled]:
        """Return what the draft source and the KV store complain of, since this was last asked."""
        drafting: list[Troubled] = self._call("seer_troubles")[0] if self._drafts else []
        return self._pool_troubles.take() + drafting

    def teach(self, text: SiblingText) -> None:
        """Let the draft source know what a response has written on another instance."""
        if self._opens:
            self._call("seer_learn", text)

    def forget_group(self, group_id: str) -> None:
        """Let the draft source and the KV pool forget a group."""
        if self._opens:
            self._call("seer_forget", group_id)
        if self._connector is not None:
            self._connector.forget_group(group_id)

    def pool_told(self, note: Mapping[str, int]) -> None:
        """Hand on to the KV store what the pool has told."""
        if self._connector is not None:
            self._connector.store.told(note)

    def pool_note(self) -> dict[str, int]:
        """Return what the store has to tell the pool."""
        return {} if self._connector is None else self._connector.store.note()

    def measure_steps(
        self, batch: Sequence[int], draft_tokens: Sequence[int], context_tokens: int | None
    ) -> StepTimes:
        """Measure steps of these sizes."""
        times = self._measure(batch, draft_tokens, context_tokens)
        if times is None:
            raise Refusal("it can run no size of this grid")
        return times

    def reset_cache(self) -> None:
        """Forget all cached KV and all drafts."""
        if self._drafts:
            self._call("seer_reset")
        if self._connector is not None:
            self._connector.reset()
        self._reset_prefix_cache()

    def update_weights(self, source: WeightSpec, version: int) -> str:
        """Load weights, if they are the model's tensors, and let the layers prove it.

        An error half-way leaves a broken model: it is no refusal, and ends the process.
        """
        dtype: Any = self._engine.vllm_config.model_config.dtype  # a torch.dtype by now
        begun = perf_counter()
        checkpoint.open_checked(source, self._tensors, self._call("seer_ties")[0], dtype)
        log.info("weights_checked", version=version, checked_s=round(perf_counter() - begun, 4))
        fingerprint = self._fingerprint("seer_load", source, version)
        self._weight_version = version
        try:
            self.reset_cache()
        except Refusal as error:
            raise EngineError(str(error)) from error
        return fingerprint

    def sleep(self) -> int:
        """Forget all KV and give its memory back; on a GPU that of the weights too, which wait in the host's.

        On a GPU it is vLLM's sleep mode, of level 1.  On a CPU the weights stay: vLLM computes there with
        packed copies of which only their kernels know.
        """
        on_cpu = current_platform.is_cpu()
        if not on_cpu and not self._engine.vllm_config.model_config.enable_sleep_mode:
            raise Refusal("it cannot give memory back; set engine_args = { enable_sleep_mode = true }")
        self.reset_cache()
        self._fingerprint_asleep = self._fingerprint("seer_fingerprint")
        before = self._used_bytes()
        if on_cpu:
            self._call("seer_release_kv")
        else:
            self._engine.sleep(level=1)
        return max(0, before - self._used_bytes())

    def wake(self) -> None:
        """Take the memory again, and see that the model answers by the weights of before."""
        if not current_platform.is_cpu():
            self._engine.wake_up()
            self._call("seer_clear_kv")  # new memory holds anything, numbers that are not finite too
        if self._fingerprint("seer_fingerprint") != self._fingerprint_asleep:
            raise EngineError("it woke with other weights than it fell asleep with")

    def watch(self, on: bool) -> list[Row]:
        """Keep the logits of every choice from now on, or no longer; return those kept."""
        rows: list[Row] = self._call("seer_watch", on)[0]
        return rows

    def close(self) -> None:
        """End the draft source, the store, and the processes vLLM started; all else goes with this one."""
        if self._store is not None:
            self._store.close()
        if self._opens:
            with suppress(Exception):  # a worker may be gone
                self._call("seer_stop_drafting")
        if self._engine.vllm_config.parallel_config.world_size > 1:
            self._engine.engine_core.shutdown()

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of ``WorkerExtension`` in every worker."""
        return self._engine.collective_rpc(method, args=arguments)

    def _fingerprint(self, method: str, *arguments: Any) -> str:
        """Return what all workers say of their weights."""
        return f"vllm:{'-'.join(self._call(method, *arguments))}"

    def _used_bytes(self) -> int:
        used: list[int] = self._call("seer_used_bytes")
        return sum(used)

    def _cleanse(self) -> list[Failed]:
        """Clear KV memory after values that are not finite, which masks and zeros do not stop.

        What is running begins its chunk anew, and comes to the same tokens; what cannot is returned.
        """
        self._poisoned = False
        jobs = [running.job for running in self._running.values()]
        for job in jobs:
            self.abort(job.id)
        if not self._engine.reset_prefix_cache():
            raise EngineError(UNRESET)
        self._call("seer_clear_kv")
        failed = []
        for job in jobs:
            try:
                self.submit(job)
            except Refusal as refusal:
                failed.append(Failed(job.id, str(refusal)))
        return failed

    def _reset_prefix_cache(self) -> None:
        if not self._engine.reset_prefix_cache():
            raise Refusal(UNRESET)

    def _bench(self) -> VllmBench:
        return VllmBench(self._engine, self._scheduler, self._connector, self._drafts)

    def _sampling_params(self, job: ChunkJob) -> SamplingParams:
        return SamplingParams(
            temperature=job.sampling.temperature,
            top_p=job.sampling.top_p,
            top_k=job.sampling.top_k,
            max_tokens=job.max_tokens,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={
                "seed": job.seed,
                "request": job.request_id,
                "group": job.group_id,
                "prompt_tokens": job.prompt_tokens,
                "last": job.last,
            },
        )

    def _measure_moves(self) -> dict[str, float]:
        """Return what chunks cost to begin and to move, by the field of ``InstanceInfo``."""
        measured = MoveMeter(self._bench()).measure()
        log.info("moves_measured", **measured)
        return measured

    def _measure(
        self,
        batch: Sequence[int],
        draft_tokens: Sequence[int],
        context_tokens: int | None,
        cell_s: float = math.inf,
    ) -> StepTimes | None:
        times = StepMeter(self._bench(), cell_s).measure(batch, draft_tokens, context_tokens)
        self._reset_prefix_cache()
        return times

    def _attach(self, source: SourceSpec) -> None:
        """Make the draft source, with step times of this instance if it comes without."""
        times = source.step_times
        if times is None:
            begun = perf_counter()
            grid = start_grid(self.info.max_running, source.draft_tokens)
            times = self._measure(*grid, None, CELL_S)
            if times is None:
                raise EngineError("too little KV memory to measure a step: raise kv_cache_bytes")
            log.info("steps_measured", times=times, took_s=round(perf_counter() - begun, 1))
        self._call("seer_attach", source, self._draft_host(source, times))

    def _draft_host(self, source: SourceSpec, times: StepTimes) -> DraftHost:
        return DraftHost(
            instance_id=self.info.id,
            max_running=self.info.max_running,
            max_model_tokens=self.info.max_model_tokens,
            vocab_size=self._engine.vllm_config.model_config.get_vocab_size(),
            draft_tokens=source.draft_tokens,
            step_times=times,
        )

    def _share(self, spec: StoreSpec) -> KVStore:
        """Make this instance's end of the KV pool, and let vLLM use it."""
        connector = self._connector
        assert connector is not None
        tell = self._pool_troubles.tell
        host = StoreHost(self.info.id, connector.block_bytes, connector.block_tokens, tell)
        store = STORE.make(spec.path, spec.settings, host)
        connector.attach(store, lambda block_ids: self._call("seer_read_kv", block_ids)[0], tell)
        return store

    def _describe(self, instance_id: str) -> InstanceInfo:
        config = self._engine.vllm_config
        block_tokens, blocks = config.cache_config.block_size, config.cache_config.num_gpu_blocks
        assert blocks is not None
        return InstanceInfo(
            id=instance_id,
            kv_capacity_tokens=(blocks - 1) * block_tokens,  # the first block is vLLM's null block
            block_tokens=block_tokens,
            max_running=config.scheduler_config.max_num_seqs,
            max_model_tokens=config.model_config.max_model_len,
            kv_bytes_per_token=self._kv_bytes_per_token(),
            fingerprint=self._fingerprint("seer_fingerprint"),
            shares_prompts=config.cache_config.enable_prefix_caching,
            kv_kind="vllm",
        )

    def _kv_bytes_per_token(self) -> int:
        groups = self._scheduler.kv_cache_config.kv_cache_groups
        return sum(
            group.kv_cache_spec.page_size_bytes * len(group.layer_names) // group.kv_cache_spec.block_size
            for group in groups
        )

    def _finish(self, result: RequestOutput) -> Finished | Failed:
        job, vllm_id = self._running.pop(result.request_id)
        account = self._scheduler.settle(vllm_id)
        completion = result.outputs[0]
        if completion.finish_reason not in ("stop", "length"):
            return Failed(job.id, f"vLLM ended the chunk: {completion.finish_reason}")
        assert isinstance(completion.logprobs, FlatLogprobs)
        if not math.isfinite(sum(completion.logprobs.logprobs)):
            self._poisoned = True
            return Failed(job.id, NOT_FINITE)
        cached_tokens = (result.num_cached_tokens or 0) - account.pool_tokens
        return Finished(
            ChunkOutput(
                job_id=job.id,
                token_ids=Tokens(completion.token_ids),
                logprobs=Logprobs(completion.logprobs.logprobs),
                stopped=completion.finish_reason == "stop",
                cached_tokens=cached_tokens,
                prefilled_tokens=len(job.token_ids) - cached_tokens - account.pool_tokens,
                computed_tokens=account.computed_tokens,
                preemptions=account.request.num_preemptions,
                weight_version=self._weight_version,
                steps=len(completion.token_ids) - account.spared_steps,
                drafted_at=account.drafted_at,
                accepted_at=account.accepted_at,
                pool_tokens=account.pool_tokens,
            )
        )
