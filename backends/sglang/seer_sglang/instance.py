"""One SGLang engine in this process: what is particular to SGLang of an instance."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import structlog
import torch
from seer_host.model_kv import mixers_of
from seer_host.ports import reserved_port
from seer_worker.machine import memory_bytes
from seer_worker.process.adapter import EndedChunk, EngineAdapter, LogitRow, Meters, Rejected, ScriptedTokens
from seer_worker.process.drafts import SourceProposer
from seer_worker.process.figures import serve_figures
from seer_worker.process.meters import BenchMeters, Sizes
from seer_worker.process.pooling import AWAITED_BYTES, PooledRequests
from seer_worker.weights import checkpoint
from seer_worker.wire import Start, Telemetry

from seer_core.error_origin import fact_of
from seer_core.errors import EngineError
from seer_core.model import InstanceInfo
from seer_core.model.arrays import TopLogprobs
from seer_core.ports.engine import ChunkJob
from seer_core.ports.kv import KVStore
from seer_core.ports.weights import WeightSpec
from seer_sglang import SUPPORTED_SGLANG, internals
from seer_sglang.rank import RankStart, SglangRank
from seer_sglang.ranks import LeadingRank

if TYPE_CHECKING:
    from seer_sglang.blocks import SglangLayers
    from seer_sglang.engine import Chunk

__all__ = ["SglangAdapter"]

log = structlog.get_logger("seer")

UNLIKE_LAYERS = "AmbiguousGlobalPerLayerAttributeError"
"""What transformers raises where all layers are asked for one value, and have several."""

LONGEST_FACT = 300
"""Characters of an error of SGLang's, which may list all models that it supports."""

BINDING = "SGLANG_CPU_OMP_THREADS_BIND"
"""The variable that has the CPUs of each rank."""

EMPTY_STEPS = 16
"""SGLang may plan nothing for some steps while it puts away what has been dropped; more, and it is stuck."""


class SglangAdapter(EngineAdapter):
    """An instance of SGLang."""

    def __init__(self, start: Start) -> None:
        if start.source is not None and start.settings["page_size"] > 1:
            raise EngineError(
                "a drafter needs block_size = 1 in [engine.sglang]: set it, or take the drafter out"
            )
        on_cpu = internals.check_kernels()
        if on_cpu:
            _check_memory(start.settings)
            _check_layers(Path(start.settings["model_path"]) / "config.json")
        internals.check_imports()
        from prometheus_client import REGISTRY

        from seer_sglang import cache, weights
        from seer_sglang.engine import SglangEngine, read_vocab_size, server_args

        settings = dict(start.settings)
        kv_cache_bytes, paths = settings.pop("kv_cache_bytes"), settings.pop("draft_paths")
        self._awaited_bytes: int | None = settings.pop("awaited_kv_bytes", AWAITED_BYTES)
        uniform = settings.pop("uniform_drafts", None)
        source, count = start.source, settings.get("tp_size", 1)
        if source is not None:
            settings |= {
                "speculative_algorithm": "NGRAM",
                "speculative_num_draft_tokens": source.draft_tokens + 1,
            }
        if on_cpu:
            settings |= {"device": "cpu", "attention_backend": "torch_native"}
            settings.setdefault("disable_cuda_graph", True)
            if count > 1:  # SGLang wants CPUs for each rank, and without its own kernels binds none
                os.environ.setdefault(BINDING, "|".join(map(str, range(count))))
        if start.store is not None:
            cache.register()
            settings["radix_cache_backend"] = cache.BACKEND
        proposer = None
        self._ranks = LeadingRank(count)
        self._base = checkpoint.first_weights(settings["model_path"])
        with _blaming_settings():
            args = server_args(settings, kv_cache_bytes)
            if source is not None:
                most = args.max_running_requests
                proposer = SourceProposer(source.draft_tokens, read_vocab_size(args), most, paths)
            ends = start.end_token_ids
            uniform = not args.disable_cuda_graph if uniform is None else uniform
            with reserved_port() as port:
                self._ranks.send(RankStart(settings, kv_cache_bytes, count, port, uniform, ends))
                self.engine = SglangEngine(
                    args, proposer, self._ranks, port, uniform_drafts=uniform, end_token_ids=ends
                )
        self._rank = SglangRank(self.engine)
        self._tensors = checkpoint.headers_of(settings["model_path"])
        if on_cpu and count == 1 and self.engine.runner.model_config.quantization is None:
            weights.expect_all_loaded(self.engine.runner.model, self._tensors)
        self._draft_tokens = 0 if source is None else source.draft_tokens
        self._empty_steps = 0
        self.vocab_size = self.engine.vocab_size
        self.drafts: SourceProposer | None = proposer
        figures = serve_figures(start.address, REGISTRY) if args.enable_metrics else ""
        self.info = self._describe(start.instance_id, figures)
        self._pool: PooledRequests | None = None

    def submit(self, job: ChunkJob, salt: str, script: ScriptedTokens | None = None) -> None:
        """Queue a chunk."""
        try:
            self.engine.add(job, salt, script=script)
        except ValueError as error:
            raise Rejected(f"SGLang refuses the chunk: {error}") from error

    def hold_image(self, digest: str, data: bytes) -> None:
        """Hold the file of an image."""
        self.engine.hold_image(digest, data)

    def drop_images(self, digests: Sequence[str]) -> None:
        """Forget images."""
        self.engine.drop_images(digests)

    def abort(self, job_ids: Sequence[str]) -> None:
        """Drop running chunks."""
        self.engine.abort(job_ids)

    def end_chunk(self, job_id: str) -> None:
        """Let a running chunk end with its next token."""
        self.engine.end(job_id)

    def stop_chunk(self, job_id: str) -> EndedChunk:
        """End a running chunk at once; return it with all that it has written."""
        chunk = self.engine.chunk(job_id)
        tokens, logprobs = self.written(job_id, 0)
        tops = self.top_logprobs(job_id, 0, len(tokens))
        ended = attrs.evolve(self._ended(chunk), token_ids=tokens, logprobs=logprobs, top_logprobs=tops)
        self.engine.stop(job_id)
        return attrs.evolve(ended, stopped=True, failure=None)

    def step(self) -> list[EndedChunk]:
        """Make one step; return the chunks it ended."""
        ended = self.engine.step()
        working = self.engine.computed.requests or self.engine.awaits_kv
        self._empty_steps = 0 if working else self._empty_steps + 1
        if self.engine.chunks and self._empty_steps > EMPTY_STEPS:
            raise EngineError(f"SGLang plans no step for the {len(self.engine.chunks)} chunks that it has")
        return [self._ended(chunk) for chunk in ended]

    def _ended(self, chunk: Chunk) -> EndedChunk:
        tokens = chunk.token_ids
        return EndedChunk(
            chunk.writing.job.id,
            tokens,
            chunk.writing.logprobs[: len(tokens)],
            stopped=chunk.stopped,
            cached_tokens=chunk.cached_tokens or 0,
            preemptions=chunk.req.retraction_count,
            account=chunk.account,
            failure=None if chunk.given_up is None else f"SGLang ended the chunk: {chunk.given_up}",
            top_logprobs=_most_probable(chunk, 0, len(tokens)),
            prompt_logprobs=chunk.prompt_logprobs,
            attachments=self.engine.routing.of(chunk.req),
        )

    def written(self, job_id: str, start: int) -> tuple[list[int], list[float]]:
        """Return what a running chunk has written."""
        chunk = self.engine.chunk(job_id)
        return list(chunk.token_ids[start:]), chunk.writing.logprobs[start:]

    def top_logprobs(self, job_id: str, start: int, end: int) -> TopLogprobs | None:
        """Return the most probable tokens at these places of a running chunk, if it asks for them."""
        return _most_probable(self.engine.chunk(job_id), start, end)

    def telemetry(self) -> Telemetry:
        """Return how much SGLang has to do."""
        waiting = self.engine.waiting
        return Telemetry(len(self.engine.chunks) - waiting, waiting, self.engine.kv_usage)

    def meters(self) -> Meters:
        """Return what measures steps and chunks of made-up requests."""
        from seer_sglang.bench import SglangBench

        scheduler, info = self.engine.scheduler, self.info
        sizes = Sizes(
            vocab=self.vocab_size,
            model_tokens=info.max_model_tokens,
            running=info.max_running,
            step_tokens=scheduler.chunked_prefill_size or scheduler.max_prefill_tokens,
            draft_tokens=self._draft_tokens,
            block_tokens=info.block_tokens,
            blocks=info.kv_capacity_tokens // info.block_tokens,
        )
        drafting = None if self.drafts is None else self.drafts.drafting
        return BenchMeters(SglangBench(self.engine, self.reset_cache, sizes, drafting, self._pool))

    def reset_cache(self) -> None:
        """Drop all cached KV; what is not finite in its memory is written over before it is read."""
        self.engine.settle()
        if self.engine.chunks or not self.engine.flush():
            raise EngineError("SGLang could not reset its prefix cache")

    def share_kv(
        self, open_store: Callable[[int, int], KVStore], report: Callable[[str], None]
    ) -> PooledRequests:
        """Share KV through SGLang's cache."""
        layers = self._kv()
        store = open_store(layers.block_bytes * self.engine.parts.parts, layers.block_tokens)
        self._pool = self.engine.share(layers, store, report, self._awaited_bytes)
        return self._pool

    def _kv(self) -> SglangLayers:
        """Return SGLang's KV as the pool has it; an emulated instance has another."""
        return self.engine.shared_layers()

    def update_weights(self, source: WeightSpec, version: int) -> str:
        """Load weights, if they are the model's tensors, and see that they arrive; an adapter is merged."""
        dtype: Any = self.engine.config.dtype
        for rejection in self._call("check", source, self._tensors, dtype, self._base):
            if rejection is not None:
                raise Rejected(rejection)
        return self._joined(self._call("load", version))

    def fingerprint(self) -> str:
        """Return what stands for the weights of all ranks."""
        return self._joined(self._call("fingerprint"))

    def _joined(self, fingerprints: list[str]) -> str:
        """Return one fingerprint of all ranks', which is compared with those of the same layout."""
        return f"{self.engine.parts.layout}:{'-'.join(fingerprints)}"

    def sleep(self) -> int:
        """Give KV memory back; on a GPU that of weights too, if they have a copy."""
        before = self._used_bytes()
        self._call("release")
        return max(0, before - self._used_bytes())

    def _used_bytes(self) -> int:
        """Return the memory in use: the processes', or all of their devices."""
        return sum(self._call("used_bytes"))

    def wake(self) -> None:
        """Take the memory again."""
        self._call("restore")

    def watch(self, on: bool) -> list[LogitRow]:
        """Keep the logits of every choice from now on, or no longer; return those kept."""
        return self.engine.watch(on)

    def close(self) -> None:
        """End the other ranks."""
        self._ranks.close()

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of ``SglangRank`` in every rank; return what they return, in order."""
        self._ranks.send((method, arguments))
        try:
            mine = getattr(self._rank, method)(*arguments)
        except Exception:
            with suppress(EngineError):
                self._ranks.answers()  # which would be taken for those of the next call
            raise
        return [mine, *self._ranks.answers()]

    def _describe(self, instance_id: str, metrics_address: str) -> InstanceInfo:
        from seer_sglang import weights

        scheduler, config = self.engine.scheduler, self.engine.config
        quantization = self.engine.runner.model_config.quantization
        page = scheduler.page_size
        # SGLang lets a request in if its tokens and a page are fewer than what is free.
        capacity = (scheduler.max_total_num_tokens - page - 1) // page * page
        if capacity < config.context_len:
            raise EngineError(
                f"KV memory holds {capacity} tokens, and a response may have {config.context_len}: raise"
                " kv_cache_bytes or lower max_model_tokens"
            )
        pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
        return InstanceInfo(
            id=instance_id,
            kv_capacity_tokens=capacity,
            block_tokens=page,
            max_running=scheduler.max_running_requests,
            max_model_tokens=config.context_len,
            kv_bytes_per_token=int(sum(pool.get_kv_size_bytes()))
            // (pool.size + pool.page_size)
            * self.engine.parts.parts,
            shares_prompts=True,
            kv_kind=self.engine.parts.kind,
            ends_early=True,
            metrics_address=metrics_address,
            fingerprint=self.fingerprint(),
            quantization=str(quantization or "") if weights.quantises(self.engine.runner.model) else "",
        )


def _most_probable(chunk: Chunk, start: int, end: int) -> TopLogprobs | None:
    wanted = chunk.writing.job.sampling.top_logprobs
    return TopLogprobs.of(chunk.writing.tops[start:end]) if wanted else None


def _check_memory(settings: Mapping[str, Any]) -> None:
    """Make sure that the KV memory of an instance on a CPU is bounded, and less than there is."""
    kv_cache_bytes, memory = settings["kv_cache_bytes"], memory_bytes()
    ranks = settings.get("tp_size", 1)
    if kv_cache_bytes is None and settings.get("max_total_tokens") is None:
        raise EngineError("without kv_cache_bytes SGLang would take nearly all memory; set it")
    if kv_cache_bytes is not None and ranks * kv_cache_bytes >= memory:
        each = "" if ranks == 1 else f" for each of {ranks} ranks"
        raise EngineError(
            f"kv_cache_bytes is {kv_cache_bytes / 2**30:.1f} GiB{each}, and the machine has"
            f" {memory / 2**30:.1f} GiB of memory; lower it"
        )


WITHOUT_KERNELS = {
    "latent": "latent attention (MLA) whose places are not scaled by yarn",
    "delta net": "gated delta nets",
    "mamba": "Mamba-2",
    "sinks": "attention sinks",
}
"""What SGLang's models may have, and its kernels' stand-in has nothing for."""


def _check_layers(config: Path) -> None:
    """Make sure that SGLang can compute a model's layers without its own kernels."""
    with suppress(OSError, msgspec.DecodeError):  # SGLang says it of such a file
        settings = msgspec.json.decode(config.read_bytes(), type=dict[str, Any])
        kinds = mixers_of(settings) | ({"sinks"} if settings.get("model_type") == "gpt_oss" else set())
        text = settings.get("text_config") or settings
        rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
        if (rope.get("rope_type") or rope.get("type")) == "yarn":
            kinds -= {"latent"}
        lacking = [name for kind, name in WITHOUT_KERNELS.items() if kind in kinds]
        if lacking:
            raise EngineError(
                f"SGLang without a GPU has no kernels for {' and '.join(lacking)}: serve the model on a GPU"
            )


@contextmanager
def _blaming_settings() -> Iterator[None]:
    """Say in one sentence what SGLang finds wrong with a model or a setting; the log has the rest."""
    try:
        yield
    except EngineError:
        raise
    except torch.distributed.DistNetworkError as error:
        raise EngineError(
            f"another process has taken the port that SGLang was about to open, {error}; start again"
        ) from error
    except Exception as error:
        log.exception("sglang_refuses")
        if type(error).__name__ == UNLIKE_LAYERS:
            raise EngineError(
                f"SGLang {SUPPORTED_SGLANG} with transformers {version('transformers')} reads no config.json"
                " of layers whose heads have different widths: serve the model by [engine.vllm]"
            ) from error
        fact = fact_of(error)[:LONGEST_FACT].rstrip(": .")
        if not str(error):  # a bare assertion
            *_, where = traceback.extract_tb(error.__traceback__)
            fact = f"{fact} in {where.name}() of {Path(where.filename).name}"
        raise EngineError(
            f"SGLang cannot serve the model so: {fact}; correct model, dtype or engine_args in"
            " [engine.sglang]"
        ) from error
