"""What SGLang's scheduler sees of a model: steps that are paced, and tokens that are read from a script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import attrs
import numpy as np
import torch
from seer_sglang.blocks import Layers
from seer_sglang.engine import SglangEngine
from sglang.srt.managers.utils import GenerationBatchResult

from seer_core.ports import ChunkJob
from seer_paced.emulation import LOGPROB, Emulation
from seer_paced.script import Said
from seer_paced.slots import Slots, prints_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["PacedForward", "PacedLayers"]


@attrs.frozen
class Text:
    """A request's whole text, and the fingerprint of every token."""

    name: str
    tokens: Sequence[int]
    prints: NDArray[np.uint64]


class PacedForward:
    """Stands where SGLang computes a batch.

    ``admitted`` are the requests of whose contexts the last step has computed a part.
    """

    def __init__(self, engine: SglangEngine, emulation: Emulation) -> None:
        self.admitted: list[str] = []
        self._engine = engine
        self._pace, self._cost, self._extras = emulation.pace, emulation.cost, emulation.extras
        self._texts: WeakKeyDictionary[Any, Text] = WeakKeyDictionary()
        self._loaded_tokens = self._version = 0
        self._kv = Slots(*map(_words, engine.kv_layers))
        self._rows = engine.scheduler.req_to_token_pool.req_to_token.numpy()
        engine.scheduler.model_worker.forward_batch_generation = self._compute

    def say(self, req: Any, job: ChunkJob, said: Said) -> None:
        """Take what a request will say, before it runs."""
        tokens = [*job.token_ids, *said.token_ids]
        self._texts[req] = Text(job.request_id, tokens, prints_of(tokens, self._version))

    def turn(self, version: int) -> None:
        """Forget all KV, for the weights are other ones now."""
        self._version = version
        self._kv.clear()

    def loaded(self, tokens: int) -> None:
        """Be told that the next step follows a load from the KV pool."""
        self._loaded_tokens += tokens

    def saved(self, tokens: int) -> None:
        """Let the time pass in which so many tokens' KV goes to the pool."""
        self._pace.spend(self._extras.move_s_per_token * tokens)

    def _compute(self, batch: Any, **_: Any) -> GenerationBatchResult:
        """Make a step."""
        reqs, cost = batch.reqs, self._cost
        texts = [self._texts[req] for req in reqs]
        if batch.forward_mode.is_extend():
            befores = batch.prefix_lens
            ends = [before + new for before, new in zip(befores, batch.extend_lens, strict=True)]
            self._prefill(reqs, texts, befores, ends)
            attention_s = sum(
                cost.prefill_attention_s(before, end - before)
                for before, end in zip(befores, ends, strict=True)
            )
            positions = sum(ends) - sum(befores)
            self.admitted = [text.name for text in texts]
        else:
            ends = [len(req.origin_input_ids) + len(req.output_ids) for req in reqs]
            self._decode(reqs, texts, ends)
            attention_s = sum(ends) * cost.attention_s(1)
            positions = len(reqs)
            self.admitted = []
        self._pace.spend(cost.pass_s(positions, len(reqs), len(reqs)) + attention_s + self._moved_s())
        for req, end in zip(reqs, ends, strict=True):
            chunk = self._engine.chunks.get(req.rid)  # None: it was dropped, and SGLang makes one more step
            if chunk is not None:
                chunk.writing.wrote(end, LOGPROB)
        return GenerationBatchResult(
            next_token_ids=torch.tensor([text.tokens[end] for text, end in zip(texts, ends, strict=True)])
        )

    def _prefill(
        self, reqs: Sequence[Any], texts: Sequence[Text], befores: Sequence[int], ends: Sequence[int]
    ) -> None:
        for req, text, before, end in zip(reqs, texts, befores, ends, strict=True):
            slots = self._rows[req.kv.req_pool_idx, :end]
            self._kv.check(slots[:before], text.prints[:before], [text.name])
            self._kv.write(slots[before:], text.prints[before:end])

    def _decode(self, reqs: Sequence[Any], texts: Sequence[Text], ends: Sequence[int]) -> None:
        """Write the KV of each request's last token, and look at that of the one before."""
        rows, places = [req.kv.req_pool_idx for req in reqs], np.array(ends)
        before, last = (
            np.array([text.prints[end - back] for text, end in zip(texts, ends, strict=True)])
            for back in (2, 1)
        )
        self._kv.check(self._rows[rows, places - 2], before, [text.name for text in texts])
        self._kv.write(self._rows[rows, places - 1], last)

    def _moved_s(self) -> float:
        """Return the seconds in which what this step needs was loaded."""
        tokens, self._loaded_tokens = self._loaded_tokens, 0
        return self._extras.move_s + self._extras.move_s_per_token * tokens if tokens else 0.0


class PacedLayers(Layers):
    """KV that takes its time to move."""

    def __init__(self, layers: Sequence[Tensor], page_tokens: int, forward: PacedForward) -> None:
        super().__init__(layers, page_tokens)
        self._forward = forward

    def read(self, slots: Tensor) -> NDArray[np.uint8]:
        """Return blocks for the pool; the step under way takes longer for it."""
        self._forward.saved(len(slots))
        return super().read(slots)

    def write(self, slots: Tensor, blocks: NDArray[np.uint8]) -> None:
        """Fill slots from the pool; the step that follows takes longer for it."""
        self._forward.loaded(len(slots))
        super().write(slots, blocks)


def _words(layer: Tensor) -> NDArray[np.uint64]:
    """Return KV memory as the words in it, one for each slot."""
    return layer.view(torch.int64).numpy().view(np.uint64).reshape(-1)
