"""One vLLM engine as Seer uses it: chunks in, finished chunks out, everything accounted for."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from vllm import EngineArgs, SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.llm_engine import LLMEngine

from seer_core.model import InstanceInfo
from seer_core.ports import ChunkJob, ChunkOutput
from seer_vllm.scheduler import AccountingScheduler
from seer_vllm.wire import Failed, Finished, Load, Start

__all__ = ["Instance"]

EXTENSION = "seer_vllm.sampling.KeyedSamplingExtension"
SCHEDULER = "seer_vllm.scheduler.AccountingScheduler"


class _Running(NamedTuple):
    job: ChunkJob
    vllm_id: str


class Instance:
    """A vLLM engine with its core in this process, and the chunks it is working on."""

    def __init__(self, start: Start) -> None:
        args = EngineArgs(
            **start.engine_args,
            worker_extension_cls=EXTENSION,
            scheduler_cls=SCHEDULER,
            async_scheduling=False,
            disable_log_stats=True,
        )
        if current_platform.is_cpu() and args.kv_cache_memory_bytes is None:
            raise ValueError("without kv_cache_bytes vLLM would take nearly all memory; set it")
        self._engine = LLMEngine.from_engine_args(args)
        self._engine.collective_rpc("seer_install_keyed_sampling")
        assert isinstance(self._engine.engine_core, InprocClient)
        scheduler = self._engine.engine_core.engine_core.scheduler
        assert isinstance(scheduler, AccountingScheduler)
        self._scheduler = scheduler
        self._running: dict[str, _Running] = {}
        self._weight_version = 0
        self.info = self._describe(start.instance_id)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._running)

    def submit(self, job: ChunkJob) -> Failed | None:
        """Queue a chunk; return the refusal if it cannot be run."""
        if job.weight_version != self._weight_version:
            wanted, loaded = job.weight_version, self._weight_version
            return Failed(job.id, f"the chunk wants weight version {wanted}, loaded is {loaded}")
        tokens = len(job.token_ids) + job.max_tokens
        if tokens > self.info.max_model_tokens:
            limit = self.info.max_model_tokens
            return Failed(job.id, f"the chunk needs {tokens} tokens, max_model_tokens is {limit}")
        try:
            params = SamplingParams(
                temperature=job.sampling.temperature,
                top_p=job.sampling.top_p,
                top_k=job.sampling.top_k,
                max_tokens=job.max_tokens,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args={"seed": job.seed, "request": job.request_id, "group": job.group_id},
            )
            prompt = tokens_input(job.token_ids, cache_salt=f"weights-{self._weight_version}")
            vllm_id = self._engine.add_request(job.id, prompt, params)
        except (VLLMClientError, ValueError) as error:
            return Failed(job.id, f"vLLM refuses the chunk: {error}")
        self._running[job.id] = _Running(job, vllm_id)
        return None

    def abort(self, job_id: str) -> None:
        """Drop a chunk, if it is still running."""
        running = self._running.pop(job_id, None)
        if running is not None:
            self._engine.abort_request([job_id])
            self._scheduler.settle(running.vllm_id)

    def step(self) -> list[Finished | Failed]:
        """Make one step; return the chunks it ended."""
        outputs = self._engine.step()
        return [self._finish(o) for o in outputs if isinstance(o, RequestOutput) and o.finished]

    def load(self) -> Load:
        """Return the instance's load as vLLM sees it."""
        running, waiting = self._scheduler.get_request_counts()
        return Load(running, waiting, self._scheduler.get_kv_cache_usage())

    def reset_cache(self) -> str | None:
        """Forget all cached KV; return why not, if not."""
        if self._running:
            return f"{len(self._running)} chunks are running"
        if not self._engine.reset_prefix_cache():
            return "vLLM could not reset its prefix cache"
        return None

    def update_weights(self, source: str, version: int) -> str | None:
        """Load the safetensors of a directory; return why not, if not.

        An error half-way leaves a broken model: it is raised, and ends the process.
        """
        if self._running:
            return f"{len(self._running)} chunks are running"
        if not any(Path(source).glob("*.safetensors")):
            return f"no safetensors in {source!r}"
        self._engine.collective_rpc("reload_weights", kwargs={"weights_path": source})
        self._weight_version = version
        return self.reset_cache()

    def close(self) -> None:
        """End the processes vLLM started, if any; all else goes with this one."""
        if self._engine.vllm_config.parallel_config.world_size > 1:
            self._engine.engine_core.shutdown()

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
        )

    def _finish(self, result: RequestOutput) -> Finished | Failed:
        job, vllm_id = self._running.pop(result.request_id)
        work = self._scheduler.settle(vllm_id)
        completion = result.outputs[0]
        if completion.finish_reason not in ("stop", "length"):
            return Failed(job.id, f"vLLM ended the chunk: {completion.finish_reason}")
        assert isinstance(completion.logprobs, FlatLogprobs)
        cached_tokens = result.num_cached_tokens or 0
        return Finished(
            ChunkOutput(
                job_id=job.id,
                token_ids=list(completion.token_ids),
                logprobs=completion.logprobs.logprobs,
                stopped=completion.finish_reason == "stop",
                cached_tokens=cached_tokens,
                prefilled_tokens=len(job.token_ids) - cached_tokens,
                computed_tokens=work.computed_tokens,
                preemptions=work.preemptions,
                weight_version=self._weight_version,
            )
        )
