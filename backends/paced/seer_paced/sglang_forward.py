"""Emulated steps and tokens of a script, for SGLang's scheduler in place of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import attrs
import numpy as np
import torch
from seer_sglang.blocks import SglangLayers
from seer_sglang.engine import SglangEngine
from seer_worker.process.copy_buffers import STAGED_BYTES
from seer_worker.process.pooling import AWAITED_BYTES, PooledRequests
from sglang.srt.managers.utils import GenerationBatchResult

from seer_core.ports.kv import Bytes
from seer_paced.emulated_thread import EmulatedThread
from seer_paced.emulation import LOGPROB, Emulation
from seer_paced.slots import Slots, prints_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["BatchForward", "TimedLayers"]


@attrs.frozen
class Text:
    """A request's whole text, and the fingerprint of every token."""

    name: str
    tokens: Sequence[int]
    prints: NDArray[np.uint64]


class TimedLayers(SglangLayers):
    """KV that takes its time to move: saved in the step under way, loaded in the one that follows.

    Staged, or loaded by a request that has waited for it, it has moved beside steps.
    """

    def __init__(self, engine: SglangEngine, emulation: Emulation) -> None:
        super().__init__(engine.kv_layers, engine.scheduler.page_size)
        self.loaded_tokens = 0
        self._emulation = emulation
        emulated_bytes = round(emulation.cost.kv_bytes_per_token) * self.block_tokens
        awaited_bytes = emulation.settings.awaited_kv_bytes
        self.awaited_blocks = (AWAITED_BYTES if awaited_bytes is None else awaited_bytes) // emulated_bytes
        self.most_staged = min(self.most_staged, max(1, STAGED_BYTES // emulated_bytes))
        self.stage_from_half_of(self.awaited_blocks)

    def read(self, slots: Tensor) -> Bytes:
        """Return blocks for the pool."""
        self._emulation.time.spend(self._emulation.save_s(len(slots)))
        return super().read(slots)

    def write(self, slots: Tensor, blocks: Bytes) -> None:
        """Fill slots from the pool."""
        if len(blocks) <= self.awaited_blocks:
            self.loaded_tokens += len(slots)
        super().write(slots, blocks)


class BatchForward:
    """Takes the place of the method by which SGLang computes a batch."""

    def __init__(self, engine: SglangEngine, emulation: Emulation) -> None:
        self.layers = TimedLayers(engine, emulation)
        self._engine, self._emulation = engine, emulation
        self._texts: WeakKeyDictionary[Any, Text] = WeakKeyDictionary()
        self._version = emulation.weight_version
        self._kv = Slots(*map(_words, engine.kv_layers))
        self._rows = engine.scheduler.req_to_token_pool.req_to_token.numpy()
        engine.scheduler.model_worker.forward_batch_generation = self._compute

    def move_beside(self, pooled: PooledRequests) -> None:
        """Emulate what moves beside steps."""
        emulation, layers = self._emulation, self.layers
        fetches = EmulatedThread(
            emulation.time, lambda found: emulation.load_s(found.count * layers.block_tokens)
        )
        pooled.work_in(fetches, EmulatedThread(emulation.time, lambda _: 0.0))
        pooled.awaited_blocks = layers.awaited_blocks
        self._engine.pause = lambda: emulation.time.spend(fetches.next_s())

    def _compute(self, batch: Any, **_: Any) -> GenerationBatchResult:
        """Make a step."""
        if self._version != self._emulation.weight_version:
            self._version = self._emulation.weight_version
            self._kv.clear()
        reqs, cost, time = batch.reqs, self._emulation.cost, self._emulation.time
        texts = [self._text(req) for req in reqs]
        if batch.forward_mode.is_extend():
            befores = batch.prefix_lens
            ends = [before + new for before, new in zip(befores, batch.extend_lens, strict=True)]
            self._prefill(reqs, texts, befores, ends)
            attention_s = sum(
                cost.prefill_attention_s(before, end - before)
                for before, end in zip(befores, ends, strict=True)
            )
            positions = sum(ends) - sum(befores)
            time.admit([text.name for text in texts])
        else:
            ends = [len(req.origin_input_ids) + len(req.output_ids) for req in reqs]
            self._decode(reqs, texts, ends)
            attention_s = sum(ends) * cost.attention_s(1)
            positions = len(reqs)
        loaded, self.layers.loaded_tokens = self.layers.loaded_tokens, 0
        step_s = cost.pass_s(positions, len(reqs), len(reqs)) + attention_s
        time.spend(step_s + self._emulation.load_s(loaded))
        for req, end in zip(reqs, ends, strict=True):
            chunk = self._engine.chunks.get(req.rid)  # None: it was dropped, and SGLang makes one more step
            if chunk is not None:
                chunk.writing.wrote(end, LOGPROB)
        return GenerationBatchResult(
            next_token_ids=torch.tensor([text.tokens[end] for text, end in zip(texts, ends, strict=True)])
        )

    def _text(self, req: Any) -> Text:
        text = self._texts.get(req)
        if text is None:
            job, script = (req.sampling_params.custom_params[name] for name in ("job", "script"))
            tokens = [*job.token_ids, *script.token_ids]
            text = self._texts[req] = Text(job.request_id, tokens, prints_of(tokens, self._version))
        return text

    def _prefill(
        self, reqs: Sequence[Any], texts: Sequence[Text], befores: Sequence[int], ends: Sequence[int]
    ) -> None:
        for req, text, before, end in zip(reqs, texts, befores, ends, strict=True):
            slots = self._rows[req.kv.req_pool_idx, :end]
            self._kv.check(slots[:before], text.prints[:before], [text.name])
            self._kv.write(slots[before:], text.prints[before:end])

    def _decode(self, reqs: Sequence[Any], texts: Sequence[Text], ends: Sequence[int]) -> None:
        """Write the KV of each request's last token, and check that of the one before."""
        rows, places = [req.kv.req_pool_idx for req in reqs], np.array(ends)
        before, last = (
            np.array([text.prints[end - back] for text, end in zip(texts, ends, strict=True)])
            for back in (2, 1)
        )
        self._kv.check(self._rows[rows, places - 2], before, [text.name for text in texts])
        self._kv.write(self._rows[rows, places - 1], last)


def _words(layer: Tensor) -> NDArray[np.uint64]:
    """Return KV memory as the words in it, one for each slot."""
    return layer.view(torch.int64).numpy().view(np.uint64).reshape(-1)
