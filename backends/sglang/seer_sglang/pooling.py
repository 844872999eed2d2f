"""What an instance of SGLang gives to a pool of KV, and what it takes out.

Blocks are copied out of the store, and checked, before SGLang is promised a single token of them.  They are
written to the store when a request leaves its KV, before anybody knows that its chunk has ended, so that
whoever goes on with it finds them.  A response that is over is dropped from the store at once, its prompt
with the last of its group.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np
from seer_host.stores import Guarded, Staged
from torch import Tensor

from seer_core.kv import KVStore
from seer_core.ports import ChunkJob
from seer_sglang import SUPPORTED_SGLANG
from seer_sglang.blocks import Layers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

__all__ = ["Pooling"]


@attrs.define(eq=False)
class Pooled:
    """A request whose KV may be in the pool; ``saves`` if it may go there."""

    job: ChunkJob
    saves: bool
    keys: list[bytes]
    """Of its text's blocks, after one that stands for what comes before a text."""
    staged: Staged | None = None


class Pooling:
    """One instance's dealings with its store.

    ``sound()`` says whether the step just made computed numbers that are finite, and KV that may be shared.
    """

    def __init__(
        self, layers: Layers, store: KVStore, sound: Callable[[], bool], tell: Callable[[str], None]
    ) -> None:
        self.store = Guarded(store, tell)
        self._layers = layers
        self._sound = sound
        self._requests: dict[str, Pooled] = {}
        self._prompts: dict[str, Sequence[bytes]] = {}

    def open(self, rid: str, job: ChunkJob, salt: str, *, saves: bool = True) -> None:
        """Take a request; ``salt`` stands for the weights."""
        origin = repr(("sglang", SUPPORTED_SGLANG, self._layers.layout, salt))
        self._requests[rid] = Pooled(job, saves, [hashlib.sha256(origin.encode()).digest()])

    def close(self, rid: str) -> None:
        """Let go of a request, ended or not."""
        self._requests.pop(rid, None)

    def stage(self, rid: str, tokens: array[int], cached: int, limit: int) -> int:
        """Copy out what the store has of a text's first ``limit`` tokens behind those cached.

        Returns for how many tokens behind those cached ``load`` has KV.
        """
        pooled = self._requests.get(rid)
        if pooled is None:
            return 0
        size = self._layers.block_tokens
        first = cached // size
        if pooled.staged is None or pooled.staged.first != first:
            keys = self._keys(pooled, tokens[: limit // size * size])[first:]
            pooled.staged = Staged(first, self.store.fetch(keys, self._layers.block_bytes))
        return max(0, (first + len(pooled.staged.blocks)) * size - cached)

    def load(self, rid: str, slots: Tensor) -> None:
        """Write what has been staged into the slots given for it."""
        pooled = self._requests[rid]
        assert pooled.staged is not None
        self._layers.write(slots, pooled.staged.blocks)
        pooled.staged = None

    def end(self, rid: str, tokens: array[int], slots: Tensor, *, cut: bool) -> None:
        """Save the KV of a chunk at its end, or drop that of a response that is over, but for its prompt.

        ``cut``: the chunk ended at its last token; the response goes on, unless it was its last chunk.
        """
        pooled = self._saved(rid)
        if pooled is None:
            return
        written = self._split(pooled, tokens)
        if cut and not pooled.job.last:
            self.save(rid, tokens, slots)
        else:
            self._drop(written)

    def save(self, rid: str, tokens: array[int], slots: Tensor) -> None:
        """Save the KV of a text's first tokens, which lies in these slots, as far as the store lacks it."""
        pooled, size = self._saved(rid), self._layers.block_tokens
        if pooled is None or not self._sound():
            return
        whole = slots[: len(slots) // size * size].view(-1, size)
        keys = self._keys(pooled, tokens)[: len(whole)]

        def save(store: KVStore) -> None:
            lacking = store.lacks(keys)
            if lacking:
                store.put([keys[i] for i in lacking], self._layers.read(whole[lacking].flatten()))

        self.store.ask(save, None)

    def give_up(self, rid: str) -> None:
        """Drop what there is of a chunk that nobody wants any more, but for its group's prompt."""
        pooled = self._saved(rid)
        if pooled is not None:
            self._drop(self._split(pooled, array("q", pooled.job.token_ids)))

    def forget_group(self, group_id: str) -> None:
        """Drop the prompt of a group that is over."""
        self._drop(self._prompts.pop(group_id, []))

    def reset(self) -> None:
        """Forget which groups there are."""
        self._prompts.clear()

    def _keys(self, pooled: Pooled, tokens: array[int]) -> list[bytes]:
        """Return the keys of a text's whole blocks: each stands for its tokens and all before them."""
        size, keys = self._layers.block_tokens, pooled.keys
        count = len(tokens) // size
        for begin in range((len(keys) - 1) * size, count * size, size):
            keys.append(hashlib.sha256(keys[-1] + tokens[begin : begin + size].tobytes()).digest())
        return keys[1 : count + 1]

    def _split(self, pooled: Pooled, tokens: array[int]) -> Sequence[bytes]:
        """Keep in mind the keys of a group's prompt; return all others that a text has had here."""
        self._keys(pooled, tokens)
        prompt = 1 + pooled.job.prompt_tokens // self._layers.block_tokens
        self._prompts.setdefault(pooled.job.group_id, pooled.keys[1:prompt])
        return pooled.keys[prompt:]

    def _saved(self, rid: str) -> Pooled | None:
        """Return a request whose KV may go to the pool."""
        pooled = self._requests.get(rid)
        return pooled if pooled is not None and pooled.saves else None

    def _drop(self, keys: Sequence[bytes]) -> None:
        if keys:
            self.store.ask(lambda store: store.drop(keys), None)
