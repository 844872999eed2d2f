"""The requests of an SGLang instance whose KV may be in the pool: keys of their texts, slots of their KV."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from seer_core.ports.engine import ChunkJob
from seer_sglang import SUPPORTED_SGLANG
from seer_sglang.blocks import SglangLayers
from seer_sglang.ranked_pool import RankPool

__all__ = ["KvPoolAdapter"]


@attrs.define(eq=False)
class Pooled:
    """A request whose KV may come from the pool; ``saves`` if it may go there."""

    job: ChunkJob
    saves: bool
    keys: list[bytes]
    """Of its text's blocks, after one that stands for what comes before a text."""
    waits: bool = False
    """Whether its blocks are still being copied out of the store."""
    saved: int | None = None
    """So many of its blocks, from the first on, were found when it was let in, or are on their way to the
    store.
    """


class KvPoolAdapter:
    """The port between SGLang's prefix cache and the pool.

    ``sound()`` returns whether the step just made computed finite numbers, and so KV that may be shared.
    Only requests of the same salt share any.  Texts are as the cache has them: an image's tokens there follow
    from its digest, so the keys of their blocks name it.
    """

    def __init__(self, layers: SglangLayers, pool: RankPool, sound: Callable[[], bool]) -> None:
        self.pool = pool
        self._layers = layers
        self._staged_keys: list[bytes] = []
        self._sound = sound
        self._requests: dict[str, Pooled] = {}

    def open(self, rid: str, job: ChunkJob, salt: str, *, saves: bool = True) -> None:
        """Take a request; ``salt`` stands for the weights and the kind of KV."""
        origin = repr((SUPPORTED_SGLANG, self._layers.layout, salt))
        self._requests[rid] = Pooled(job, saves, [hashlib.sha256(origin.encode()).digest()])

    def close(self, rid: str) -> None:
        """Forget a request, ended or not."""
        self._requests.pop(rid, None)
        self.pool.unstage(rid)

    def stage(self, rid: str, tokens: array[int], cached: int, limit: int) -> int:
        """Copy out what the store has of a text's first ``limit`` tokens behind those cached.

        Returns for how many tokens behind those cached ``load`` has KV; none while the request ``waits``.
        """
        pooled = self._requests.get(rid)
        if pooled is None:
            return 0
        size = self._layers.block_tokens
        first = cached // size
        keys = self._keys(pooled, tokens[: limit // size * size])[first:]
        found = self.pool.stage(rid, first, keys)
        pooled.waits = found is None
        return 0 if found is None else max(0, (first + found) * size - cached)

    def waits(self, rid: str) -> bool:
        """Return whether a request's KV was still being copied when it was last asked for."""
        pooled = self._requests.get(rid)
        return pooled is not None and pooled.waits

    @property
    def waiting(self) -> bool:
        """Whether a request waits for its KV."""
        return any(pooled.waits for pooled in self._requests.values())

    def let_in(self, rid: str, found: int) -> None:
        """Take note that a request is let in, with the KV of its first ``found`` tokens.

        What has not been loaded for it by now will not be.
        """
        self.pool.unstage(rid)
        pooled = self._requests.get(rid)
        if pooled is not None and pooled.saved is None:
            pooled.saved = found // self._layers.block_tokens

    def stage_running(
        self, computed: Mapping[str, int], texts: Callable[[str, int], tuple[array[int], Tensor]]
    ) -> None:
        """Begin to copy out full blocks of running chunks that are not saved yet, as many as one step may.

        Nothing is copied while they are fewer than ``staged_from``: a copy costs a launch for each layer,
        however few its blocks.  ``computed`` has for each chunk the number of tokens whose KV is there, and
        ``texts(rid, n)`` returns its tokens and the slots of the first n.  The step that is made meanwhile
        writes none of them.
        """
        size, most = self._layers.block_tokens, self._layers.most_staged
        full: list[tuple[str, Pooled, int, int]] = []
        for rid, count in computed.items():
            pooled = self._saved(rid)
            if pooled is None or pooled.saved is None or pooled.job.last:
                continue
            if count // size > pooled.saved:
                full.append((rid, pooled, pooled.saved, count // size))
        if sum(blocks - first for _, _, first, blocks in full) < self._layers.staged_from:
            return
        staged = []
        for rid, pooled, first, blocks in full:
            end = min(blocks, first + most - len(self._staged_keys))
            if end == first:
                break
            pooled.saved = end
            tokens, slots = texts(rid, end * size)
            self._staged_keys += self._keys(pooled, tokens)[first:end]
            staged.append(slots[first * size :])
        if staged:
            self._layers.stage(torch.cat(staged))

    def put_staged(self) -> None:
        """Begin to put into the store what was staged, before any of it can be dropped."""
        keys, self._staged_keys = self._staged_keys, []
        if keys:
            self.pool.save_beside(keys, self._layers.take())

    def load(self, rid: str, slots: Tensor) -> None:
        """Write what has been staged into the slots given for it."""
        self._layers.write(slots, self.pool.load(rid))

    def end(self, rid: str, tokens: array[int], slots: Tensor, *, cut: bool) -> None:
        """Save the KV of a chunk or a turn at its end; drop that of a response that is over, but its prompt,
        or else its trajectory.

        ``cut``: the chunk ended at its last token; the response goes on, unless it was its last chunk.
        """
        pooled = self._saved(rid)
        if pooled is None:
            return
        job = pooled.job
        if job.trajectory:
            self.pool.drop_with_group(job.trajectory, self._keys(pooled, tokens))
            self.save(rid, tokens, slots)
            return
        written = self._split(pooled, tokens)
        last = job.last and len(tokens) == len(job.token_ids) + job.max_tokens
        turn = job.turns and not cut
        if turn:
            self.pool.drop_with_group(job.group_id, written)
        if turn or (cut and not last):
            self.save(rid, tokens, slots)
        else:
            self.pool.drop(written)

    def save(self, rid: str, tokens: array[int], slots: Tensor) -> None:
        """Save the KV of a text's first tokens, which lies in these slots, as far as the store lacks it."""
        pooled, size = self._saved(rid), self._layers.block_tokens
        if pooled is None or not self._sound():
            return
        whole = slots[: len(slots) // size * size].view(-1, size)
        keys = self._keys(pooled, tokens)[: len(whole)]

        self.pool.save(keys, lambda lacking: self._layers.read(whole[lacking].flatten()))

    def give_up(self, rid: str, tokens: array[int]) -> None:
        """Drop what there is of an aborted chunk, which began with these tokens, but for its prompt."""
        pooled = self._saved(rid)
        if pooled is not None and not pooled.job.trajectory:
            self.pool.drop(self._split(pooled, tokens))

    def _keys(self, pooled: Pooled, tokens: array[int]) -> list[bytes]:
        """Return the keys of a text's whole blocks: each stands for its tokens and all before them."""
        size, keys = self._layers.block_tokens, pooled.keys
        count = len(tokens) // size
        for begin in range((len(keys) - 1) * size, count * size, size):
            keys.append(hashlib.sha256(keys[-1] + tokens[begin : begin + size].tobytes()).digest())
        return keys[1 : count + 1]

    def _split(self, pooled: Pooled, tokens: array[int]) -> Sequence[bytes]:
        """Keep the keys of the group's prompt; return all others that a text has had here."""
        self._keys(pooled, tokens)
        prompt_blocks = pooled.job.prompt_tokens // self._layers.block_tokens
        return self.pool.beyond_prompt(pooled.job.group_id, pooled.keys[1:], prompt_blocks)

    def _saved(self, rid: str) -> Pooled | None:
        """Return a request whose KV may go to the pool."""
        pooled = self._requests.get(rid)
        return pooled if pooled is not None and pooled.saves else None
