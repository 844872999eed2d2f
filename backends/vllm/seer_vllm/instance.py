"""One vLLM engine, its core in this process: what is particular to vLLM of an instance."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from time import perf_counter
from typing import Any

import structlog
from msgspec import structs
from seer_host.images import IMAGES
from seer_host.model_kv import mixers_of
from seer_host.routed_experts import first_wanted
from seer_worker.process.adapter import EndedChunk, EngineAdapter, LogitRow, Meters, Rejected, ScriptedTokens
from seer_worker.process.dead_ranks import NOTICE_S, end_after_grace
from seer_worker.process.figures import serve_figures
from seer_worker.process.meters import BenchMeters
from seer_worker.process.pooling import AWAITED_BYTES, PAUSE_S, PooledRequests
from seer_worker.process.shared_blocks import SharedBlocks
from seer_worker.weights import checkpoint
from seer_worker.wire import Degraded, Start, Telemetry
from vllm import EngineArgs, SamplingParams
from vllm import __version__ as vllm_version
from vllm.config import KVTransferConfig
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.triton_utils import HAS_TRITON
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.prometheus import get_prometheus_registry
from vllm.v1.request import RequestStatus

from seer_core.errors import EngineError
from seer_core.model import InstanceInfo
from seer_core.model.arrays import Logprobs, PromptLogprobs, TopLogprobs
from seer_core.ports.drafting import DraftContext, SiblingTokens, SourceSpec
from seer_core.ports.engine import ChunkJob
from seer_core.ports.kv import Bytes, KVStore
from seer_core.ports.weights import WeightSpec
from seer_vllm import adapters, cpu_rounding, internals, patches
from seer_vllm.bench import VllmBench
from seer_vllm.connector import StoreConnector
from seer_vllm.draft_lengths import lengths_of
from seer_vllm.formats import naming_format
from seer_vllm.images import VllmImages
from seer_vllm.kv_groups import bytes_per_token, room_of
from seer_vllm.parts import check_kv_dtype, parts_of
from seer_vllm.proposer import own_method, speculative_config
from seer_vllm.routing import EXPERTS_FROM, WITH_EXPERTS, RequestExperts
from seer_vllm.runners import SECOND, refuse_other_runners, settle_runner, settle_scheduler, wanted_ahead
from seer_vllm.scheduler import AccountingScheduler, RequestAccount

__all__ = ["VllmAdapter"]

log = structlog.get_logger("seer")

EXTENSION = "seer_vllm.extension.WorkerExtension"
UNRESET = "vLLM could not reset its prefix cache"


class VllmAdapter(EngineAdapter):
    """An instance of vLLM.

    What computes the steps of an emulated one is the worker class in ``start.settings``, and ``block_bytes``
    are those that a block of its KV stands for.
    """

    def __init__(self, start: Start, block_bytes: int | None = None) -> None:
        internals.check_imports(on_cpu=current_platform.is_cpu())
        patches.install(Path(start.scratch))
        if current_platform.is_cpu():
            cpu_rounding.install()
        source = start.source
        settings = {"disable_log_stats": True, "enforce_eager": current_platform.is_cpu(), **start.settings}
        uniform = settings.pop("uniform_drafts", None)
        awaited_bytes = settings.pop("awaited_kv_bytes", AWAITED_BYTES)
        ahead = settings.pop("async_scheduling", None)
        ranks = settings.get("tensor_parallel_size", 1)
        choice = settle_runner(source, ranks)
        second = choice.runner == SECOND
        self._returns_experts = bool(settings.get("enable_return_routed_experts"))
        if self._returns_experts:
            refuse_other_runners(choice)
        lengths: tuple[int, ...] = ()
        if source is not None and own_method(source) is None:
            lengths = lengths_of(source.draft_tokens)
        if uniform is False or (uniform is None and settings["enforce_eager"]):
            lengths = ()
        # Without it vLLM keeps no window and no state of a response for the chunk that goes on with it.
        settings.setdefault("prefix_cache_retention_interval", None)
        settings.setdefault("mm_processor_cache_gb", 0)  # ``VllmImages`` keeps what is processed
        args = EngineArgs(
            **settings,
            speculative_config=None
            if source is None
            else speculative_config(source, second=second, lengths=lengths),
            kv_transfer_config=None if start.store is None else kv_transfer(self._returns_experts),
            worker_extension_cls=EXTENSION,
            async_scheduling=wanted_ahead(ahead, source, pooled_ranks=0 if start.store is None else ranks),
        )
        if current_platform.is_cpu() and args.kv_cache_memory_bytes is None:
            raise EngineError("without kv_cache_bytes vLLM would take nearly all memory; set it")
        # On a GPU it decides how many tokens a step prefills: 2,048 without, 8,192 or more with LLM's.
        usage = UsageContext.ENGINE_CONTEXT if current_platform.is_cpu() else UsageContext.LLM_CLASS
        with naming_format(settings.get("quantization")):
            config = args.create_engine_config(usage)
        if current_platform.is_cpu() and "mamba" in mixers_of(config.model_config.hf_config.to_dict()):
            raise EngineError("vLLM's build for CPUs cannot compute Mamba-2: serve the model on a GPU")
        check_kv_dtype(config)
        if source is not None and config.model_config.is_hybrid and not HAS_TRITON:
            raise EngineError(
                "drafts for a model with recurrent layers need Triton, which vLLM's build for CPUs has not:"
                " take the drafter out of [seer].plugins"
            )
        if config.lora_config is not None and config.model_config.is_moe and not HAS_TRITON:
            raise EngineError(
                "adapters beside a mixture's experts need Triton, which vLLM's build for CPUs has not: take"
                " lora_rank out of [engine.vllm], and each adapter is merged into the weights"
            )
        spread = ranks > 1 and config.parallel_config.enable_expert_parallel
        if spread and current_platform.is_cpu() and config.model_config.quantization is not None:
            raise EngineError(
                "vLLM's kernels of quantised experts for CPUs cannot find those of a rank: take"
                " enable_expert_parallel out of engine_args"
            )
        settle_scheduler(config, ahead)
        if current_platform.is_cpu() and "fp8" in (config.model_config.quantization or ""):
            patches.multiply_fp8_in_float32()
        patches.fork_ranks()
        self._base = checkpoint.first_weights(config.model_config.model)
        """The whole weights, to which adapters belong."""
        with naming_format(config.model_config.quantization, lora=config.lora_config is not None):
            self.engine = LLMEngine.from_vllm_config(config, usage, disable_log_stats=args.disable_log_stats)
        internals.check_engine(self.engine)
        self._end_token_ids = start.end_token_ids
        [runner, *_] = self._call("seer_install", start.end_token_ids)
        self._emulated = runner is None
        if runner is not None:
            schedules = {"async_scheduling": config.scheduler_config.async_scheduling}
            log.info("model_runner", vllm=vllm_version, runner=runner, reason=choice.reason, **schedules)
        assert isinstance(self.engine.engine_core, InprocClient)
        self._core = self.engine.engine_core.engine_core
        scheduler = self._core.scheduler
        assert isinstance(scheduler, AccountingScheduler)
        internals.check_scheduler(scheduler, routing=self._returns_experts)
        if uniform or self.engine.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
            scheduler.draft_lengths = lengths
        self._scheduler = scheduler
        self._connector = scheduler.connector if isinstance(scheduler.connector, StoreConnector) else None
        if self._connector is not None:
            self._connector.use_block_bytes(block_bytes or self._connector.block_bytes, awaited_bytes)
        if self._returns_experts:
            scheduler.experts = RequestExperts(
                scheduler, lambda *tokens: self._call("seer_read_experts", *tokens)[0]
            )
        specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
        self._parts = parts_of(self.engine.vllm_config, specs)
        self._kv_order: str = self._call("seer_kv_order")[0]
        self._closing = False
        if self._parts.ranks > 1:
            reason = f"one of its {self._parts.ranks} ranks has ended"
            end = partial(end_after_grace, reason, lambda: self._closing)
            self._core.model_executor.register_failure_callback(end)
        self._images = VllmImages(self.engine)
        self._requests: dict[str, str] = {}
        """vLLM's ids of running chunks, by Seer's."""
        model = self.engine.vllm_config.model_config.model
        self._tensors = checkpoint.headers_of(model)
        self._adapter: LoRARequest | None = None
        """What asks vLLM for the adapter that is kept beside them."""
        self.vocab_size = self.engine.vllm_config.model_config.get_vocab_size()
        figures = "" if args.disable_log_stats else serve_figures(start.address, get_prometheus_registry())
        self.info = self._describe(start.instance_id, figures)
        self.drafts: VllmDrafts | None = (
            None if source is None else VllmDrafts(self._call, own_method(source) is None, scheduler)
        )

    def submit(self, job: ChunkJob, salt: str, script: ScriptedTokens | None = None) -> None:
        """Queue a chunk; what emulates the steps finds a script in its ``extra_args``."""
        salt = f"{salt}-{self._kv_order}"
        try:
            prompt: Any = tokens_input(job.token_ids, cache_salt=salt)
            if IMAGES in job.attachments:
                prompt = self._images.input(job, salt)
            params = _sampling_params(job, self._end_token_ids, script)
            if self._returns_experts:
                assert params.extra_args is not None
                params.extra_args[EXPERTS_FROM] = first_wanted(job)
            request_id = self.engine.add_request(job.id, prompt, params, lora_request=self._adapter)
        except (VLLMClientError, ValueError) as error:
            raise Rejected(f"vLLM refuses the chunk: {error}") from error
        self._requests[job.id] = request_id
        if self.drafts is not None:
            self.drafts.open(request_id, job)

    def hold_image(self, digest: str, data: bytes) -> None:
        """Hold the file of an image."""
        self._images.hold(digest, data)

    def drop_images(self, digests: Sequence[str]) -> None:
        """Forget images."""
        self._images.drop(digests)

    def abort(self, job_ids: Sequence[str]) -> None:
        """Drop running chunks."""
        self._leave(job_ids)

    def end_chunk(self, job_id: str) -> None:
        """Let a running chunk end with its next token."""
        request = self._scheduler.requests.get(self._requests[job_id])
        if request is not None:  # else it has ended early, in a step that is still under way
            request.max_tokens = min(request.max_tokens, request.num_output_tokens + 1)

    def stop_chunk(self, job_id: str) -> EndedChunk:
        """End a running chunk at once; return it with all that it has written."""
        tokens, logprobs = self.written(job_id, 0)
        tops = self.top_logprobs(job_id, 0, len(tokens))
        state = self.engine.output_processor.request_states[self._requests[job_id]]
        assert state.logprobs_processor is not None
        # Of a turn that is over the connector saves the KV, as it does not of an abort.
        self._scheduler.finish_requests(self._requests[job_id], RequestStatus.FINISHED_STOPPED)
        [account] = self._leave([job_id])
        return EndedChunk(
            job_id,
            tokens,
            logprobs,
            stopped=True,
            cached_tokens=state.num_cached_tokens - account.pool_tokens,
            preemptions=account.request.num_preemptions,
            account=account,
            top_logprobs=tops,
            prompt_logprobs=_of_prompt(state.logprobs_processor.prompt_logprobs),
            attachments=self._attachments(account),
        )

    def step(self) -> list[EndedChunk]:
        """Make one step; return the chunks it ended."""
        outputs = self._step()
        ended = [output for output in outputs if isinstance(output, RequestOutput) and output.finished]
        if ended:
            self._close([self._requests[output.request_id] for output in ended])
        return [self._ended(output) for output in ended]

    def written(self, job_id: str, start: int) -> tuple[list[int], list[float]]:
        """Return what a running chunk has written, which vLLM keeps until it hands out all of it."""
        state = self.engine.output_processor.request_states[self._requests[job_id]]
        assert state.detokenizer is not None
        return state.detokenizer.output_token_ids[start:], _chosen(self._logprobs(job_id), start)

    def top_logprobs(self, job_id: str, start: int, end: int) -> TopLogprobs | None:
        """Return the most probable tokens at these places of a running chunk, if it asks for them."""
        return _most_probable(self._logprobs(job_id), start, end)

    def telemetry(self) -> Telemetry:
        """Return how much vLLM has to do."""
        return Telemetry(*self._scheduler.get_request_counts(), self._scheduler.get_kv_cache_usage())

    def meters(self) -> Meters:
        """Return what measures steps and chunks of made-up requests."""
        drafts = self.drafts is not None
        calls = self._step, self._drain, self.reset_cache
        return BenchMeters(VllmBench(self.engine, *calls, self._scheduler, self._connector, drafts))

    def reset_cache(self) -> None:
        """Drop all cached KV."""
        self._end_loads()
        if not self.engine.reset_prefix_cache():
            raise Rejected(UNRESET)
        self._images.forget_encoded()

    def clear_kv(self) -> None:
        """Drop all cached KV, and write zeros over its memory."""
        self._end_loads()
        if not self.engine.reset_prefix_cache():
            raise EngineError(UNRESET)
        self._images.forget_encoded()
        self._call("seer_clear_kv")

    def share_kv(
        self, open_store: Callable[[int, int], KVStore], report: Callable[[str], None]
    ) -> PooledRequests:
        """Share KV through vLLM's connector."""
        connector = self._connector
        assert connector is not None
        store = open_store(connector.block_bytes, connector.block_tokens)
        connector.attach(store, self._read_kv, report, beside=not self._emulated)
        return connector.requests

    def _read_kv(self, block_ids: list[int] | None) -> Bytes:
        """Return blocks, uint8 [n, block_bytes], each rank's part; a single rank's staged ones with None."""
        assert self._connector is not None
        if self._parts.ranks == 1:
            blocks: Bytes = self._call("seer_read_kv", block_ids)[0]
            return blocks
        assert block_ids is not None
        shared = SharedBlocks(len(block_ids), self._connector.block_bytes)
        for rank, flaw in enumerate(self._call("seer_read_kv_part", block_ids, shared)):
            if flaw is not None:
                raise EngineError(f"rank {rank} cannot read its part of the KV: {flaw}")
        return shared.blocks

    def update_weights(self, source: WeightSpec, version: int) -> str:
        """Load weights, if they are the model's tensors, and let the layers prove it.

        With LoRA an adapter stays beside the whole weights; without it both are loaded as one.
        """
        dtype: Any = self.engine.vllm_config.model_config.dtype  # a torch.dtype by now
        begun_s = perf_counter()
        for rejection in self._call("seer_check", source, self._tensors, dtype, self._base):
            if rejection is not None:
                raise Rejected(rejection)
        log.info("weights_checked", version=version, checked_s=round(perf_counter() - begun_s, 4))
        fingerprint = self._joined(self._call("seer_load", version))
        self._adapter = None
        if source.adapter_config is not None and self.engine.vllm_config.lora_config is not None:
            name = f"version-{version}-{fingerprint}"  # a part of vLLM's key of each block
            self._adapter = LoRARequest(name, adapters.ID, f"in-memory:{name}")
        return fingerprint

    def fingerprint(self) -> str:
        """Return what stands for the weights of all workers."""
        return self._joined(self._call("seer_fingerprint"))

    def _joined(self, fingerprints: list[str]) -> str:
        """Return one fingerprint of all ranks', compared with those of one layout and kernels."""
        kernels, digests = zip(*(each.rpartition(":")[::2] for each in fingerprints), strict=True)
        recipe = ":".join([self._parts.layout, *sorted({*kernels} - {""})])
        return f"{recipe}:{'-'.join(digests)}"

    def sleep(self) -> int:
        """Give KV memory back; on a GPU that of the weights too, which wait in the host's.

        On a GPU it is vLLM's sleep mode, of level 1.  On a CPU the weights stay: vLLM computes there with
        packed copies that only its kernels can read.
        """
        before = self._used_bytes()
        if current_platform.is_cpu():
            self._call("seer_release_kv")
        elif self.engine.vllm_config.model_config.enable_sleep_mode:
            self.engine.sleep(level=1)
        else:
            raise Rejected("it cannot give memory back; set engine_args = { enable_sleep_mode = true }")
        return max(0, before - self._used_bytes())

    def _used_bytes(self) -> int:
        """Return the memory in use: the workers', or all of their devices."""
        return sum(self._call("seer_used_bytes"))

    def wake(self) -> None:
        """Take the memory again."""
        if not current_platform.is_cpu():
            self.engine.wake_up()
            self._call("seer_clear_kv")  # new memory holds anything, numbers that are not finite too

    def watch(self, on: bool) -> list[LogitRow]:
        """Keep the logits of every choice from now on, or no longer; return those kept."""
        rows: list[LogitRow] = self._call("seer_watch", on)[0]
        return rows

    def close(self) -> None:
        """End the processes that vLLM started."""
        self._closing = True
        if self.engine.vllm_config.parallel_config.world_size > 1:
            self.engine.engine_core.shutdown()

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of ``WorkerExtension`` in every worker."""
        with self._noticing_dead_ranks():
            return self.engine.collective_rpc(method, args=arguments)

    @contextmanager
    def _noticing_dead_ranks(self) -> Iterator[None]:
        """Turn the error that a dead rank leaves behind, in vLLM or other ranks, into one that says so."""
        try:
            yield
        except Exception as error:
            executor = self.engine.model_executor
            ends = [each.proc.sentinel for each in getattr(executor, "workers", ())]
            if ends and wait(ends, NOTICE_S):
                raise EngineError(f"one of its {self._parts.ranks} ranks has ended: {error}") from error
            raise

    def _step(self) -> list[Any]:
        """Make one step; one in which requests only wait for KV is a pause."""
        with self._noticing_dead_ranks():
            outputs = self.engine.step()
        self._drain()
        if not self._scheduler.scheduled[0] and not self._emulated:
            time.sleep(PAUSE_S)
        return outputs

    def _drain(self) -> None:
        """Take in the steps that async scheduling has begun, once they are for no request any more."""
        with self._noticing_dead_ranks():
            while self._core.batch_queue and not self.engine.has_unfinished_requests():
                self.engine.step()

    def _end_loads(self) -> None:
        """Let aborted requests give back the blocks that are still being loaded."""
        while self._connector is not None and self._connector.waits:
            self._step()

    def _logprobs(self, job_id: str) -> FlatLogprobs:
        """Return the log-probs that vLLM has kept of a running chunk."""
        state = self.engine.output_processor.request_states[self._requests[job_id]]
        assert state.logprobs_processor is not None
        logprobs = state.logprobs_processor.logprobs
        assert isinstance(logprobs, FlatLogprobs)
        return logprobs

    def _leave(self, job_ids: Sequence[str]) -> list[RequestAccount]:
        """Take running chunks out of the engine; return what they have cost."""
        self.engine.abort_request(list(job_ids))
        self._drain()
        self._close([self._requests[job_id] for job_id in job_ids])
        return [self._scheduler.settle(self._requests.pop(job_id)) for job_id in job_ids]

    def _close(self, request_ids: list[str]) -> None:
        if self.drafts is not None:
            self.drafts.close(request_ids)

    def _describe(self, instance_id: str, metrics_address: str) -> InstanceInfo:
        config = self.engine.vllm_config
        kv = self._scheduler.kv_cache_config
        block_tokens = self._scheduler.block_size
        capacity, slots = room_of(
            kv,
            block_tokens,
            config.scheduler_config.max_num_seqs,
            config.model_config.max_model_len,
            config.scheduler_config.max_num_batched_tokens,
        )
        fingerprints = self._call("seer_fingerprint")
        return InstanceInfo(
            id=instance_id,
            kv_capacity_tokens=capacity,
            block_tokens=block_tokens,
            max_running=slots,
            max_model_tokens=config.model_config.max_model_len,
            kv_bytes_per_token=bytes_per_token(kv) * self._parts.parts,
            shares_prompts=config.cache_config.enable_prefix_caching,
            kv_kind=self._parts.kind,
            ends_early=True,
            metrics_address=metrics_address,
            fingerprint=self._joined(fingerprints),
            quantization=str(config.model_config.quantization or "") if _quantised(fingerprints) else "",
        )

    def _ended(self, result: RequestOutput) -> EndedChunk:
        account = self._scheduler.settle(self._requests.pop(result.request_id))
        completion = result.outputs[0]
        reason, tokens, logprobs = completion.finish_reason, completion.token_ids, completion.logprobs
        if not isinstance(logprobs, FlatLogprobs):
            logprobs = FlatLogprobs()
        return EndedChunk(
            result.request_id,
            tokens,
            _chosen(logprobs),
            stopped=reason == "stop",
            cached_tokens=(result.num_cached_tokens or 0) - account.pool_tokens,
            preemptions=account.request.num_preemptions,
            account=account,
            failure=None if reason in ("stop", "length") else f"vLLM ended the chunk: {reason}",
            top_logprobs=_most_probable(logprobs, 0, len(tokens)),
            prompt_logprobs=_of_prompt(result.prompt_logprobs),
            attachments=self._attachments(account),
        )

    def _attachments(self, account: RequestAccount) -> dict[str, Any]:
        experts = self._scheduler.experts
        return {} if experts is None else experts.of(account.request, account.experts)


class VllmDrafts:
    """``DraftControl`` of vLLM: drafts are made in its workers, by a source or by a method of vLLM's own."""

    paths = 1

    def __init__(
        self, call: Callable[..., list[Any]], takes_source: bool, scheduler: AccountingScheduler
    ) -> None:
        self.takes_source = takes_source
        self._call = call
        self._scheduler = scheduler

    def attach(self, spec: SourceSpec, host: DraftContext) -> None:
        """Make the source in the first worker."""
        self._call("seer_attach", spec, structs.replace(host, lengths=self._scheduler.draft_lengths))

    def open(self, request_id: str, job: ChunkJob) -> None:
        """Open a chunk that vLLM calls ``request_id``."""
        if self.takes_source:
            self._call("seer_draft", "open", request_id, job)

    def close(self, request_ids: list[str]) -> None:
        """Close chunks."""
        if self.takes_source:
            self._call("seer_draft", "close", *request_ids)

    def add_sibling_tokens(self, text: SiblingTokens) -> None:
        """Hand on what a response has written on another instance."""
        if self.takes_source:
            self._call("seer_draft", "add_sibling_tokens", text)

    def forget(self, group_id: str) -> None:
        """Drop what is kept of a group."""
        if self.takes_source:
            self._call("seer_draft", "forget", group_id)

    def reset(self) -> None:
        """Drop all drafts."""
        self._call("seer_draft", "reset")

    def report(self) -> tuple[float, dict[str, float]]:
        """Return the seconds spent on drafts, and the source's figures."""
        seconds, figures = self._call("seer_draft", "report")[0]
        if self._scheduler.draft_lengths:
            steps = {
                "drafted_steps": float(self._scheduler.drafted_steps),
                "uniform_steps": float(self._scheduler.uniform_steps),
            }
            figures = figures | steps
        return seconds, figures

    def take_degradations(self) -> list[Degraded]:
        """Return what has failed since the last call."""
        degradations: list[Degraded] = self._call("seer_draft", "take_degradations")[0]
        return degradations

    def stop(self) -> None:
        """Stop the source."""
        if self.takes_source:
            with suppress(Exception):  # a worker may be gone
                self._call("seer_draft", "stop")


def kv_transfer(with_experts: bool) -> KVTransferConfig:
    """Return how vLLM finds the connector, with experts or without."""
    return KVTransferConfig(
        kv_connector="StoreConnector",
        kv_connector_module_path="seer_vllm.connector",
        kv_role="kv_both",
        kv_connector_extra_config={WITH_EXPERTS: with_experts},
    )


def _sampling_params(
    job: ChunkJob, end_token_ids: Sequence[int], script: ScriptedTokens | None
) -> SamplingParams:
    ends = () if job.sampling.ignore_eos else end_token_ids
    params = SamplingParams(
        temperature=job.sampling.temperature,
        top_p=job.sampling.top_p,
        top_k=job.sampling.top_k,
        max_tokens=job.max_tokens,
        logprobs=job.sampling.top_logprobs,
        prompt_logprobs=job.sampling.prompt_logprobs if job.prompt_tokens == len(job.token_ids) else None,
        flat_logprobs=True,
        ignore_eos=True,  # Seer's end tokens stand for those that vLLM finds
        stop_token_ids=list({*job.sampling.stop_token_ids, *ends}),
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={
            "seed": job.seed,
            "request": job.request_id,
            "group": job.group_id,
            "prompt_tokens": job.prompt_tokens,
            "context_tokens": job.context_tokens,
            "last": job.last,
            "turns": job.turns,
            "trajectory": job.trajectory,
            "may_end_early": job.may_end_early,
        },
    )
    assert params.extra_args is not None
    if params.temperature != job.sampling.temperature:  # vLLM raises one below 0.01 to that
        params.extra_args["temperature"] = job.sampling.temperature
    if job.sampling.changes_logits:
        params.extra_args["sampling"] = job.sampling
    if script is not None:
        params.extra_args["script"] = script
        params.stop_token_ids = [] if script.end is None else [script.end]
    return params


def _quantised(fingerprints: Sequence[str]) -> bool:
    """Return whether a layer is quantised; vLLM takes formats of which it may quantise none of a model."""
    return any(":" in each for each in fingerprints)


def _width(logprobs: FlatLogprobs) -> int:
    """Return how many tokens have a log-prob at each place: the one there, and the most probable ones."""
    places = zip(logprobs.start_indices[-1:], logprobs.end_indices[-1:], strict=True)
    return max((end - start for start, end in places), default=0) or 1


def _chosen(logprobs: FlatLogprobs, start: int = 0) -> list[float]:
    """Return the log-probs of the tokens themselves, from place ``start`` on."""
    width = _width(logprobs)
    return logprobs.logprobs[start * width :: width]


def _most_probable(logprobs: FlatLogprobs, start: int, end: int) -> TopLogprobs | None:
    """Return the most probable tokens at these places, if there are any."""
    width = _width(logprobs)
    if width == 1:
        return None
    kept = [at for at in range(start * width, end * width) if at % width]
    return TopLogprobs(
        width - 1, [logprobs.token_ids[at] for at in kept], [logprobs.logprobs[at] for at in kept]
    )


def _of_prompt(logprobs: Any) -> PromptLogprobs | None:
    """Return what vLLM has of a prompt, in whose first place there is nothing."""
    if not isinstance(logprobs, FlatLogprobs):
        return None
    tops = _most_probable(logprobs, 0, len(logprobs) - 1)
    return PromptLogprobs(Logprobs(_chosen(logprobs)), tops)
