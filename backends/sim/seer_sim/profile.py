"""T(B, gamma) of a simulated instance: its cost model, asked on a grid."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from seer_core.errors import EngineError
from seer_core.model import InstanceInfo
from seer_core.ports.drafting import StepTimes
from seer_sim.cost import CostModel
from seer_sim.drafts import Class, Drafts

__all__ = ["BATCH", "DRAFT_TOKENS", "step_times"]

BATCH = tuple(sorted({base << doubling for doubling in range(15) for base in (1, 3)}))
"""Batch sizes that an instance measures for its own policy: up to ``max_running`` of them count."""

DRAFT_TOKENS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
"""Draft lengths that an instance measures for its own policy."""

CONTEXT_TOKENS = 2048
"""Least context of each request in a measured step, where none is given (assumed: a first long chunk)."""

CONTEXTS = 4
"""The longest context over that of a measured step where that is more than the least (assumed: of long-tailed
lengths, a quarter of the longest is about the mean of what runs)."""


def step_times(
    cost: CostModel,
    drafts: Drafts,
    info: InstanceInfo,
    batch: Sequence[int],
    draft_tokens: Sequence[int],
    context_tokens: int | None = None,
) -> StepTimes:
    """Return the duration of decoding steps, drafting included; batches above ``max_running`` are left out.

    With ``context_tokens``, so are those whose contexts do not fit; without, contexts are as long as they can
    be, up to ``CONTEXT_TOKENS`` or a quarter of the longest, whichever is more.

    Raises:
        EngineError: no batch is left.
    """
    sizes = sorted({size for size in batch if 1 <= size <= info.max_running})
    lengths = sorted({0, *draft_tokens})
    if context_tokens is not None:
        if context_tokens > info.max_model_tokens:
            raise EngineError(
                f"instance {info.id!r} has no room for {context_tokens} tokens of context: max_model_tokens ="
                f" {info.max_model_tokens}"
            )
        sizes = [size for size in sizes if size * context_tokens <= info.kv_capacity_tokens]
    if not sizes:
        raise EngineError(
            f"instance {info.id!r} runs no more than {info.max_running} requests at once (max_running), so"
            f" none of the batches {list(batch)}; name smaller ones"
        )

    def seconds(size: int, tokens: int) -> float:
        usual = max(CONTEXT_TOKENS, info.max_model_tokens // CONTEXTS)
        most = min(usual, info.max_model_tokens, info.kv_capacity_tokens // size)
        context = most if context_tokens is None else context_tokens
        positions = fmean(drafts.positions(row, tokens) for row in range(len(drafts.table())))
        attention_s = size * (context + positions) * cost.attention_s(positions)
        drafting_s = sum(drafts.seconds([Class(size, tokens, size * context)]))
        return cost.pass_s(size * positions, size, size * positions) + attention_s + drafting_s

    return StepTimes(
        batch=tuple(sizes),
        draft_tokens=tuple(lengths),
        seconds=tuple(tuple(seconds(size, tokens) for tokens in lengths) for size in sizes),
        context_tokens=context_tokens or 0,
    )
