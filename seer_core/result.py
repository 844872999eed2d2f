"""What a rollout amounts to: its completions and the figures users compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

import msgspec

from seer_core.events import InstanceTroubled
from seer_core.model import Completion

__all__ = ["RolloutResult", "Summary", "is_something", "summarize", "tail_time_s"]

TAIL_FRACTION = 0.1
"""Share of requests, last to finish, that make the tail (paper, evaluation)."""

LEAST_TIME_S = 0.05
"""A shorter time is shown as 0.0 seconds."""


class Summary(msgspec.Struct, frozen=True):
    """A rollout in figures; times in seconds on the run's clock, tokens are output tokens.

    ``migrations`` counts chunks that ran on another instance than the one before;
    ``recomputed_tokens`` the positions run through the model a second time, because KV was evicted,
    preempted, left behind or lost.  Of speculation: ``steps`` sums, over requests, the engine steps that
    gave them tokens, so ``acceptance_length`` is tokens per step, the bonus token included (paper, and
    arXiv 2211.17192); ``acceptance_at[j]`` is the share of drafts of at least j + 1 tokens that were accepted
    that far; ``drafting_share`` the part of the engines' step time spent on making drafts.  ``troubles``
    counts what instances said to fail, by part: in this rollout, or before it if not restarted since.
    ``instances_given_up`` are down for good: lost too often, in this rollout or before it.
    ``observers_left_out`` counts those that raised, and were shown nothing from then on.
    """

    requests: int
    groups: int
    tokens: int
    total_time_s: float
    tail_time_s: float
    throughput_tokens_per_s: float
    mean_tokens: float
    max_tokens: int
    chunks: int
    migrations: int
    preemptions: int
    cached_tokens: int
    prefilled_tokens: int
    recomputed_tokens: int
    instances_lost: int
    finish_reasons: dict[str, int]
    weight_version: int
    steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    acceptance_length: float = 0.0
    acceptance_at: list[float] = []
    drafting_share: float = 0.0
    pool_tokens: int = 0
    troubles: dict[str, int] = {}
    instances_given_up: int = 0
    observers_left_out: int = 0


class RolloutResult(msgspec.Struct, frozen=True):
    """Everything a rollout produced; ``completions`` are in order of their finish."""

    completions: list[Completion]
    summary: Summary

    def __repr__(self) -> str:  # asyncio.run shows its result to the signal module: all tokens, in seconds
        return f"<RolloutResult of {len(self.completions)} completions>"


def tail_time_s(finish_times_s: Sequence[float]) -> float:
    """Return the time spent solely on the last tenth of the requests to finish."""
    times = sorted(finish_times_s)
    if not times:
        return 0.0
    early = len(times) - int(len(times) * TAIL_FRACTION)
    return times[-1] - times[early - 1]


def is_something(figure: str, value: float) -> bool:
    """Return whether a figure of a ``Summary`` is more than what shows as 0, and so has ratios to it."""
    return value >= LEAST_TIME_S if figure.endswith("time_s") else value != 0


def summarize(
    completions: Sequence[Completion],
    started_s: float,
    instances_lost: int,
    weight_version: int,
    drafting_share: float = 0.0,
    troubles: Sequence[InstanceTroubled] = (),
    instances_given_up: int = 0,
    observers_left_out: int = 0,
) -> Summary:
    """Add up a rollout that began at ``started_s``."""
    lengths = [len(completion.token_ids) for completion in completions]
    finishes = [completion.finished_s for completion in completions]
    total = max(finishes, default=started_s) - started_s
    # One pass, for there may be millions.
    chunks = migrations = preemptions = 0
    cached = prefilled = recomputed = pooled = 0
    steps = stepped = 0
    drafted: list[int] = []
    accepted: list[int] = []
    for completion in completions:
        before = None
        for chunk in completion.chunks:
            chunks += 1
            migrations += before is not None and before != chunk.instance
            before = chunk.instance
            preemptions += chunk.preemptions
            cached += chunk.cached_tokens
            prefilled += chunk.prefilled_tokens
            recomputed += chunk.recomputed_tokens
            pooled += chunk.pool_tokens
            if chunk.steps:
                steps += chunk.steps
                stepped += chunk.tokens
        drafted = _sum(drafted, *(chunk.drafted_at for chunk in completion.chunks))
        accepted = _sum(accepted, *(chunk.accepted_at for chunk in completion.chunks))
    return Summary(
        requests=len(completions),
        groups=len({completion.group_id for completion in completions}),
        tokens=sum(lengths),
        total_time_s=total,
        tail_time_s=tail_time_s(finishes),
        throughput_tokens_per_s=sum(lengths) / total if total else 0.0,
        mean_tokens=sum(lengths) / len(lengths) if lengths else 0.0,
        max_tokens=max(lengths, default=0),
        chunks=chunks,
        migrations=migrations,
        preemptions=preemptions,
        cached_tokens=cached,
        prefilled_tokens=prefilled,
        recomputed_tokens=recomputed,
        instances_lost=instances_lost,
        finish_reasons=dict(Counter(completion.finish_reason for completion in completions)),
        weight_version=weight_version,
        steps=steps,
        drafted_tokens=sum(drafted),
        accepted_tokens=sum(accepted),
        acceptance_length=stepped / steps if steps else 0.0,
        acceptance_at=[a / d for a, d in zip(accepted, drafted, strict=True) if d],
        drafting_share=drafting_share,
        pool_tokens=pooled,
        troubles=dict(Counter(trouble.what for trouble in troubles)),
        instances_given_up=instances_given_up,
        observers_left_out=observers_left_out,
    )


def _sum(*counts: Sequence[int]) -> list[int]:
    return [sum(each) for each in zip_longest(*counts, fillvalue=0)]
