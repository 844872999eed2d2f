"""The splitters: chunks of one length that a user gives, or as fine as what they cost allows."""

from __future__ import annotations

from math import sqrt
from statistics import fmean

from seer_core.errors import ConfigError
from seer_core.model import InstanceInfo, InstanceStatus, Request
from seer_core.ports.policy import Splitter
from seer_divided_rollout.servers import keeps_whole

__all__ = ["AffordableChunks", "Chunks"]

FEWEST_BLOCKS = 4
"""Blocks of the shortest chunk: KV is reserved in whole blocks, so finer chunks hardly reserve less."""

BLOCK_TOKENS = 16
"""Taken for a block while no instance has started."""

MOST_GAPS = 0.01
"""Part of a response's time that may be lost to the gaps between its chunks."""

MOVES = 0.05
"""Part of the chunks that are taken to be followed by a move."""

STEP_S, CHUNK_S, CHUNK_S_PER_TOKEN = 20e-3, 1e-3, 0.5e-6
"""Assumed where it was not measured: a step of a large model, and vLLM's work on the host for a chunk."""


class Chunks(Splitter):
    """Gives each chunk ``min(chunk_tokens, what is left)`` tokens (paper, divided rollout)."""

    def __init__(self, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens

    def instance_started(self, instance: InstanceStatus) -> None:
        """Refuse an instance that can hold no chunk."""
        block = instance.info.block_tokens
        if -(-self.chunk_tokens // block) * block > instance.info.kv_capacity_tokens:
            raise ConfigError(
                f"[plugin.divided_rollout].chunk_tokens is {self.chunk_tokens}, but the KV cache of"
                f" instance {instance.id!r} holds {instance.info.kv_capacity_tokens} tokens; make chunks"
                ' smaller, write "auto", or give the engine more KV'
            )

    def explain(self) -> str:
        """Return whose choice the length is."""
        return f"{self.chunk_tokens} tokens, as configured"

    def split(self, request: Request) -> int:
        """Return the next chunk's ``max_tokens``."""
        left = request.group.max_tokens - request.generated_tokens
        return min(self.chunk_tokens, left)


class AffordableChunks(Splitter):
    """Gives chunks of ``sqrt(2 K r)`` tokens, for K tokens of KV and r steps that a chunk's end costs.

    A chunk of c tokens is reserved whole, so half of it is not used yet, on average.  With n requests of L
    tokens each in an instance's KV that is a share c / 2L of it, and as many fewer requests run.  Of their
    next c steps, n r are lost by the ends of n chunks.  With n = K / L both shares add up to
    c / 2L + K r / Lc, which is least at ``c = sqrt(2 K r)``, where they are equal; L has dropped out.  (So is
    a checkpoint's interval chosen: Young, CACM 1974.)

    A chunk's end costs the host's work for the next chunk, and sometimes a move, which both grow with the
    context.  So r is larger for longer contexts, and their chunks are.  Of several instances the mean of
    2 K r counts.

    The next chunk of a response may be late, as on a server behind HTTP.  Its KV waits meanwhile, and so do
    as many tokens as steps pass: ``MOST_GAPS`` of the chunk's at most.  That counts where a move is cheap.
    Elsewhere room stays free for each chunk to grow by others of its length, which costs more than gaps.

    With ``whole_on_servers``, and on servers alone that share no KV, a chunk has all that a response may
    still have: the placer ends it.
    """

    def __init__(self, *, whole_on_servers: bool = False) -> None:
        self._keeps_whole = whole_on_servers
        self._instances: dict[str, InstanceInfo] = {}
        self._last_is_lost = False
        self._block = BLOCK_TOKENS
        self._most = self._block * FEWEST_BLOCKS
        self._least = 0.0
        self._square, self._square_per_token = 0.0, 0.0
        self._whole = False

    def instance_started(self, instance: InstanceStatus) -> None:
        """Note what a chunk's end costs there."""
        if self._last_is_lost:
            self._instances.clear()
            self._last_is_lost = False
        self._instances[instance.id] = instance.info
        self._weigh()

    def instance_lost(self, instance: InstanceStatus) -> None:
        """Forget the instance; the last one counts until another has started."""
        if len(self._instances) > 1:
            del self._instances[instance.id]
            self._weigh()
        else:
            self._last_is_lost = True

    def split(self, request: Request) -> int:
        """Return the next chunk's ``max_tokens``.

        It ends one token behind a block's end.  That token is sampled and has not been run, so what has been
        run fills whole blocks, which are found again: nothing is computed twice.
        """
        group, generated = request.group, request.generated_tokens
        if self._whole:
            return group.max_tokens - generated
        context_tokens = group.prompt_tokens + generated
        tokens = self.length(context_tokens)
        over = (context_tokens + tokens - 1) % self._block
        return min(max(1, tokens - over), group.max_tokens - generated)

    def length(self, context_tokens: int) -> int:
        """Return how many tokens a chunk has that begins with so long a context, in whole blocks."""
        best = max(self._least, sqrt(self._square + self._square_per_token * context_tokens))
        blocks = max(round(best / self._block), FEWEST_BLOCKS)
        return min(blocks * self._block, self._most)

    def explain(self) -> str:
        """Return the lengths chosen for some contexts."""
        if self._whole:
            return "whole responses, which end where KV runs short, for the servers share none"
        contexts = (0, 1 << 10, 1 << 12, 1 << 14)
        lengths = ", ".join(f"{self.length(tokens)} after {tokens}" for tokens in contexts)
        return f"{lengths} tokens of context, by what a chunk's end costs"

    def _weigh(self) -> None:
        """Sum up all instances: 2 K r without a context, and what each token of one adds to it."""
        infos = self._instances.values()
        self._whole = self._keeps_whole and all(map(keeps_whole, infos))
        costs = [_steps_lost(info) for info in infos]
        capacities = [info.kv_capacity_tokens for info in infos]
        self._block = max(info.block_tokens for info in infos)
        self._most = min(capacities)
        gaps = ((1 - info.move_cost) * info.chunk_gap_s / (info.step_s or STEP_S) for info in infos)
        self._least = fmean(gaps) / MOST_GAPS
        self._square = fmean(2 * kv * cost for kv, (cost, _) in zip(capacities, costs, strict=True))
        self._square_per_token = fmean(2 * kv * cost for kv, (_, cost) in zip(capacities, costs, strict=True))


def _steps_lost(info: InstanceInfo) -> tuple[float, float]:
    """Return how many steps a chunk's end costs on an instance, and how many more per token of context."""
    step_s = info.step_s or STEP_S
    chunk_s = info.chunk_s or CHUNK_S
    token_s = info.chunk_s_per_token or CHUNK_S_PER_TOKEN
    return chunk_s / step_s, (token_s + MOVES * info.move_cost * info.prefill_s_per_token) / step_s
