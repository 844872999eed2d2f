"""One SGLang engine as Seer uses it: chunks in, finished chunks out, everything accounted for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

import structlog
import torch
from msgspec import structs
from seer_host import checkpoint, memory
from seer_host.drafts import SOURCE, SourceProposer
from seer_host.instance import Refusal, Row
from seer_host.machine import memory_bytes
from seer_host.meters import CELL_S, MoveMeter, Sizes, StepMeter, start_grid
from seer_host.stores import STORE
from seer_host.troubles import Troubles
from seer_host.wire import Failed, Finished, Start, Telemetry, Troubled

from seer_core.arrays import Logprobs, Tokens
from seer_core.drafting import DraftHost, SiblingText, SourceSpec, StepTimes
from seer_core.errors import EngineError
from seer_core.kv import KVStore, StoreHost, StoreSpec
from seer_core.model import InstanceInfo
from seer_core.ports import ChunkJob, ChunkOutput
from seer_core.weights import WeightSpec
from seer_sglang import internals

if TYPE_CHECKING:
    from seer_sglang.blocks import Layers

__all__ = ["Instance"]

log = structlog.get_logger("seer")
NOT_FINITE = (
    "its log-probs are no finite numbers; if that comes again, the model's values are too large for its dtype"
)
LONGEST_FACT = 300
"""Characters of what SGLang says; it may list all models that it knows."""


class Instance:
    """A SGLang engine in this process, and the chunks it is working on."""

    def __init__(self, start: Start) -> None:
        if start.source is not None and start.settings["page_size"] > 1:
            raise EngineError(
                "a drafter needs block_size = 1 in [engine.sglang]: set it, or take the drafter out"
            )
        on_cpu = internals.check_kernels()
        if on_cpu:
            _check_memory(start.settings)
        internals.check_imports()
        from seer_sglang import cache
        from seer_sglang.bench import SglangBench
        from seer_sglang.engine import SglangEngine, read_vocab_size, server_args

        settings = dict(start.settings)
        kv_cache_bytes, paths = settings.pop("kv_cache_bytes"), settings.pop("draft_paths")
        source = start.source
        if source is not None:
            settings |= {
                "speculative_algorithm": "NGRAM",
                "speculative_num_draft_tokens": source.draft_tokens + 1,
            }
        if on_cpu:
            settings |= {"device": "cpu", "attention_backend": "torch_native"}
        if start.store is not None:
            cache.register()
            settings["radix_cache_backend"] = cache.BACKEND
        self._proposer = None
        with _blaming_settings():
            args = server_args(settings, kv_cache_bytes)
            if source is not None:
                drafts = source.draft_tokens, read_vocab_size(args), args.max_running_requests, paths
                self._proposer = SourceProposer(*drafts)
            self._engine = SglangEngine(args, self._proposer)
        self._model: torch.nn.Module = self._engine.runner.model
        self._tensors = self._check_weights(settings["model_path"], on_cpu)
        self._weight_version = 0
        self._poisoned = False
        self._fingerprint_asleep = ""
        self.info = self._describe(start.instance_id)
        self._salt = salt(0, self.info.fingerprint)
        self._pool_troubles = Troubles("kv_pool")
        self._store = None if start.store is None else self._share(start.store)
        drafting = None if self._proposer is None else self._proposer.drafting
        draft_tokens = 0 if source is None else source.draft_tokens
        self._bench = SglangBench(self._engine, self._sizes(draft_tokens), drafting)
        self.info = structs.replace(self.info, **self._measure_moves())
        if source is not None:
            self._attach(source, paths)

    def submit(self, job: ChunkJob) -> None:
        """Queue a chunk."""
        try:
            self._engine.add(job, self._salt)
        except ValueError as error:
            raise Refusal(f"SGLang refuses the chunk: {error}") from error

    def abort(self, job_id: str) -> None:
        """Drop a running chunk."""
        self._engine.abort([job_id])

    def step(self) -> list[Finished | Failed]:
        """Make one step; return the chunks it ended."""
        results = [self._finish(chunk) for chunk in self._engine.step()]
        if self._poisoned:
            results += self._cleanse()
        return results

    def written(self, job_id: str, start: int) -> tuple[list[int], list[float]]:
        """Return what a running chunk has written."""
        chunk = self._engine.chunk(job_id)
        return list(chunk.token_ids[start:]), chunk.writing.logprobs[start:]

    def telemetry(self) -> Telemetry:
        """Return what the instance is doing, as SGLang sees it."""
        waiting = self._engine.waiting
        running = len(self._engine.chunks) - waiting
        proposer = self._proposer
        return Telemetry(
            running,
            waiting,
            self._engine.kv_usage,
            drafting_s=0.0 if proposer is None else proposer.drafting.seconds,
            drafting={} if proposer is None else proposer.stats(),
        )

    def troubles(self) -> list[Troubled]:
        """Return what the draft source and the KV store complain of, since this was last asked."""
        drafting = [] if self._proposer is None else self._proposer.drafting.troubles.take()
        return self._pool_troubles.take() + drafting

    def teach(self, text: SiblingText) -> None:
        """Let the draft source know what a response has written on another instance."""
        if self._proposer is not None:
            self._proposer.learn(text)

    def forget_group(self, group_id: str) -> None:
        """Let the draft source and the KV pool forget a group."""
        if self._proposer is not None:
            self._proposer.forget(group_id)
        if self._engine.pooling is not None:
            self._engine.pooling.forget_group(group_id)

    def pool_told(self, note: Mapping[str, int]) -> None:
        """Hand on to the KV store what the pool has told."""
        if self._engine.pooling is not None:
            self._engine.pooling.store.told(note)

    def pool_note(self) -> dict[str, int]:
        """Return what the store has to tell the pool."""
        return {} if self._engine.pooling is None else self._engine.pooling.store.note()

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
        if self._proposer is not None:
            self._proposer.reset()
        if self._engine.pooling is not None:
            self._engine.pooling.reset()
        self._engine.reset_cache()

    def update_weights(self, source: WeightSpec, version: int) -> str:
        """Load weights, if they are the model's tensors, and see that they arrive.

        An error half-way leaves a broken model: it is no refusal, and ends the process.
        """
        from seer_sglang import weights

        dtype: Any = self._engine.config.dtype
        ties = checkpoint.ties(self._model)
        opened = checkpoint.open_checked(source, self._tensors, ties, dtype)
        fingerprint = weights.load(self._engine.runner, opened, version)
        self._weight_version = version
        self._salt = salt(version, fingerprint)
        self.reset_cache()
        return fingerprint

    def sleep(self) -> int:
        """Forget all KV and give its memory back; on a GPU that of weights too, if they have a copy."""
        from seer_sglang import sleeping, weights

        self.reset_cache()
        self._fingerprint_asleep = weights.fingerprint(self._model, 0)
        device = torch.device(self._engine.runner.device)
        before = memory.used_bytes(device)
        sleeping.release(self._engine.scheduler, self._engine.kv_layers)
        return max(0, before - memory.used_bytes(device))

    def wake(self) -> None:
        """Take the memory again, and see that the model answers by the weights of before."""
        from seer_sglang import sleeping, weights

        sleeping.resume(self._engine.scheduler, self._engine.kv_layers)
        if weights.fingerprint(self._model, 0) != self._fingerprint_asleep:
            raise EngineError("it woke with other weights than it fell asleep with")

    def watch(self, on: bool) -> list[Row]:
        """Keep the logits of every choice from now on, or no longer; return those kept."""
        return self._engine.sampler.watch.turn(on)

    def close(self) -> None:
        """End the store and what the draft source has started; all else goes with the process."""
        if self._store is not None:
            self._store.close()
        if self._proposer is not None:
            self._proposer.stop()

    def _cleanse(self) -> list[Failed]:
        """Forget all KV after values that are not finite, which masks and zeros do not stop.

        What is running begins its chunk anew, and comes to the same tokens; what cannot is returned.
        """
        self._poisoned = False
        jobs = [chunk.writing.job for chunk in self._engine.chunks.values()]
        self._engine.abort([job.id for job in jobs])
        self._engine.reset_cache()
        failed = []
        for job in jobs:
            try:
                self.submit(job)
            except Refusal as refusal:
                failed.append(Failed(job.id, str(refusal)))
        return failed

    def _attach(self, source: SourceSpec, paths: int) -> None:
        """Make the draft source, with step times of this instance if it comes without."""
        assert self._proposer is not None
        times = source.step_times
        if times is None:
            begun = perf_counter()
            grid = start_grid(self.info.max_running, source.draft_tokens)
            times = self._measure(*grid, None, CELL_S)
            if times is None:
                raise EngineError("too little KV memory to measure a step: raise kv_cache_bytes")
            log.info("steps_measured", times=times, took_s=round(perf_counter() - begun, 1))
        host = DraftHost(
            instance_id=self.info.id,
            max_running=self.info.max_running,
            max_model_tokens=self.info.max_model_tokens,
            vocab_size=self._engine.vocab_size,
            draft_tokens=source.draft_tokens,
            step_times=times,
            paths=paths,
            tell=self._proposer.drafting.troubles.tell,
        )
        made = SOURCE.make(source.path, source.settings, host)
        self._proposer.attach(made, lambda: self._engine.live)

    def _share(self, spec: StoreSpec) -> KVStore:
        """Make this instance's end of the KV pool, and let SGLang's cache use it."""
        layers = self._layers()
        tell = self._pool_troubles.tell
        host = StoreHost(self.info.id, layers.block_bytes, layers.block_tokens, tell)
        store = STORE.make(spec.path, spec.settings, host)
        self._engine.share(layers, store, tell)
        return store

    def _layers(self) -> Layers:
        from seer_sglang.blocks import Layers

        return Layers(self._engine.kv_layers, self._engine.scheduler.page_size)

    def _check_weights(self, model_path: str, on_cpu: bool) -> dict[str, checkpoint.Header]:
        """Return what tensors the model's files have, all of which SGLang has to have loaded."""
        from seer_sglang import weights

        tensors = checkpoint.headers_of(model_path)
        if on_cpu and self._engine.runner.model_config.quantization is None:
            weights.expect_all_loaded(self._model, tensors)
        return tensors

    def _fingerprint(self) -> str:
        """Return what stands for the weights."""
        from seer_sglang import weights

        return weights.fingerprint(self._model, 0)

    def _measure_moves(self) -> dict[str, float]:
        measured = MoveMeter(self._bench).measure()
        log.info("moves_measured", **measured)
        return measured

    def _measure(
        self,
        batch: Sequence[int],
        draft_tokens: Sequence[int],
        context_tokens: int | None,
        cell_s: float = math.inf,
    ) -> StepTimes | None:
        times = StepMeter(self._bench, cell_s).measure(batch, draft_tokens, context_tokens)
        self._engine.reset_cache()
        return times

    def _sizes(self, draft_tokens: int) -> Sizes:
        scheduler, info = self._engine.scheduler, self.info
        return Sizes(
            vocab=self._engine.vocab_size,
            model_tokens=info.max_model_tokens,
            running=info.max_running,
            step_tokens=scheduler.chunked_prefill_size or scheduler.max_prefill_tokens,
            draft_tokens=draft_tokens,
            block_tokens=info.block_tokens,
            blocks=info.kv_capacity_tokens // info.block_tokens,
        )

    def _describe(self, instance_id: str) -> InstanceInfo:
        scheduler, config = self._engine.scheduler, self._engine.config
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
            kv_bytes_per_token=int(sum(pool.get_kv_size_bytes())) // (pool.size + pool.page_size),
            fingerprint=self._fingerprint(),
            shares_prompts=True,
            kv_kind="sglang",
        )

    def _finish(self, chunk: Any) -> Finished | Failed:
        job, token_ids, logprobs = chunk.writing.job, chunk.token_ids, chunk.writing.logprobs
        if chunk.given_up is not None:
            return Failed(job.id, f"SGLang ended the chunk: {chunk.given_up}")
        if not math.isfinite(sum(logprobs)):
            self._poisoned = True
            return Failed(job.id, NOT_FINITE)
        cached_tokens = chunk.cached_tokens or 0
        return Finished(
            ChunkOutput(
                job_id=job.id,
                token_ids=Tokens(token_ids),
                logprobs=Logprobs(logprobs[: len(token_ids)]),
                stopped=chunk.stopped,
                cached_tokens=cached_tokens,
                prefilled_tokens=len(job.token_ids) - cached_tokens - chunk.account.pool_tokens,
                computed_tokens=chunk.account.computed_tokens,
                preemptions=chunk.req.retraction_count,
                weight_version=self._weight_version,
                steps=len(token_ids) - chunk.account.spared_steps,
                drafted_at=chunk.account.drafted_at,
                accepted_at=chunk.account.accepted_at,
                pool_tokens=chunk.account.pool_tokens,
            )
        )


def _check_memory(settings: Mapping[str, Any]) -> None:
    """Make sure that the KV memory of an instance on a CPU is bounded, and less than there is."""
    kv_cache_bytes, memory = settings["kv_cache_bytes"], memory_bytes()
    if kv_cache_bytes is None and settings.get("max_total_tokens") is None:
        raise EngineError("without kv_cache_bytes SGLang would take nearly all memory; set it")
    if kv_cache_bytes is not None and kv_cache_bytes >= memory:
        raise EngineError(
            f"kv_cache_bytes is {kv_cache_bytes / 2**30:.1f} GiB, and the machine has"
            f" {memory / 2**30:.1f} GiB of memory; lower it"
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
        fact = f"{type(error).__name__}: {error}".splitlines()[0][:LONGEST_FACT].rstrip(": .")
        raise EngineError(
            f"SGLang cannot serve the model so: {fact}; correct model, dtype or engine_args in"
            " [engine.sglang]"
        ) from error


def salt(version: int, fingerprint: str) -> str:
    """Return what KV of these weights is kept under."""
    return f"weights-{version}-{fingerprint}"
