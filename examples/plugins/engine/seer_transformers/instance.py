"""An engine on transformers: in each step every running chunk gets one token, one chunk after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from seer_core.model import InstanceInfo
from seer_core.ports.engine import ChunkJob
from seer_core.ports.weights import WeightSpec
from seer_worker.process.adapter import EndedChunk, EngineAdapter, LogitRow, Rejected
from seer_worker.sampling.sampler import Sampler
from seer_worker.weights import checkpoint
from seer_worker.wire import Start, Telemetry
from transformers import AutoModelForCausalLM, DynamicCache

__all__ = ["TransformersInstance"]


@attrs.define(eq=False)
class Running:
    """A chunk, what it has written, and the KV of all its tokens but the last."""

    job: ChunkJob
    token_ids: list[int] = attrs.field(factory=list)
    logprobs: list[float] = attrs.field(factory=list)
    kv: DynamicCache = attrs.field(factory=DynamicCache)


class TransformersInstance(EngineAdapter):
    """A causal language model, and the chunks it is working on."""

    def __init__(self, start: Start) -> None:
        settings = start.settings
        torch.set_num_threads(1)
        model: Any = AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=getattr(torch, settings["dtype"])
        )
        self._model = model.eval()
        self._tensors = checkpoint.headers_of(settings["model"])
        self._ends = frozenset(start.end_token_ids)
        self._sampler = Sampler(model.config.vocab_size)
        self._chunks: dict[str, Running] = {}
        most, longest = settings["max_running"], model.config.max_position_embeddings
        longest = settings["max_model_tokens"] or longest
        self.info = InstanceInfo(
            id=start.instance_id,
            kv_capacity_tokens=most * longest,
            block_tokens=1,
            max_running=most,
            max_model_tokens=longest,
        )

    def submit(self, job: ChunkJob, salt: str) -> None:
        """Queue a chunk."""
        if max(job.token_ids) >= self._model.config.vocab_size:
            raise Rejected(f"there is no token {max(job.token_ids)}")
        self._chunks[job.id] = Running(job)

    def abort(self, job_ids: Sequence[str]) -> None:
        """Drop running chunks, and their KV with them."""
        for job_id in job_ids:
            del self._chunks[job_id]

    @torch.inference_mode()
    def step(self) -> list[EndedChunk]:
        """Give each of the first ``max_running`` chunks a token."""
        ended = []
        for chunk in list(self._chunks.values())[: self.info.max_running]:
            job = chunk.job
            tokens = [chunk.token_ids[-1]] if chunk.token_ids else job.token_ids
            logits = self._model(torch.tensor([tokens]), past_key_values=chunk.kv, logits_to_keep=1).logits
            position = len(job.token_ids) + len(chunk.token_ids)
            [token], [logprob] = self._sampler.choose(logits[:, -1], [job], [position])
            chunk.token_ids.append(token)
            chunk.logprobs.append(logprob)
            stopped = token in self._ends
            if stopped or len(chunk.token_ids) == job.max_tokens:
                del self._chunks[job.id]
                ended.append(EndedChunk(job.id, chunk.token_ids, chunk.logprobs, stopped=stopped))
        return ended

    def telemetry(self) -> Telemetry:
        """Return how many chunks run and wait; their KV is what their tokens take."""
        running = min(len(self._chunks), self.info.max_running)
        held = sum(len(each.job.token_ids) + len(each.token_ids) for each in self._chunks.values())
        return Telemetry(running, len(self._chunks) - running, min(1.0, held / self.info.kv_capacity_tokens))

    def reset_cache(self) -> None:
        """Do nothing: KV ends with its chunk."""

    def update_weights(self, source: WeightSpec, version: int) -> None:
        """Load weights, if they are the model's tensors."""
        ties = checkpoint.ties(self._model)
        weights = checkpoint.open_checked(source, self._tensors, ties, self._model.dtype)
        self._model.load_state_dict(dict(weights.tensors()), strict=False)

    def watch(self, on: bool) -> list[LogitRow]:
        """Keep the logits of every choice from now on, or no longer."""
        return self._sampler.watch.turn(on)

    def close(self) -> None:
        """Do nothing: all there is goes with the process."""
