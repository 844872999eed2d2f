"""The life of a request in words, for a terminal and for a page."""

from __future__ import annotations

from collections.abc import Mapping

from seer_trace.chunk_runs import Cause, ChunkRun
from seer_trace.request_life import RequestLife, Wait

from seer_core.errors import printable

__all__ = ["COLUMNS_OF_LIFE", "beginning", "counted", "lacking", "lacks", "rows_of_life", "sums"]

COLUMNS_OF_LIFE = ("at", "for", "where", "what", "group's longest so far", "KV of the context", "drafts")

LACKS: dict[Cause, str] = {
    "slots": "for a slot",
    "kv": "for KV",
    "turn": "for its turn",
    "paused": "while the rollout was paused",
    "instances": "for an instance",
    "environment": "for its environment",
}

LACKED_NOW: dict[Cause, str] = {
    **LACKS,
    "turn": "for their turn",
    "paused": "for the rollout to go on",
    "environment": "for their environment",
}


def beginning(life: RequestLife) -> str:
    """Return what the request was."""
    group = life.group
    return (
        f"{printable(life.request_id)}: one of {group.n} responses of at most {group.max_tokens:,} tokens"
        f" to a prompt of {group.prompt_tokens:,} tokens"
    )


def rows_of_life(life: RequestLife) -> list[tuple[str, ...]]:
    """Return a row of ``COLUMNS_OF_LIFE`` for each wait and each chunk, in order."""
    rows: list[tuple[str, ...]] = []
    for part in life.parts:
        times = f"{part.begin_s - life.submitted_s:.2f} s", f"{part.end_s - part.begin_s:.2f} s"
        if isinstance(part, Wait):
            where, what, kv, drafts = "", f"waits {lacks(part.causes_s)}", "", ""
        else:
            where, what, kv, drafts = _chunk(part)
        longest = life.estimate_at(part.begin_s)
        rows.append((*times, where, what, "none done" if longest is None else f"{longest:,}", kv, drafts))
    return rows


def _chunk(part: ChunkRun) -> tuple[str, str, str, str]:
    """Return where a chunk ran, what it brought, and the sources of its KV and its tokens."""
    moved = "moved to " if part.migrated else ""
    why = f" ({printable(part.why)})" if part.why else ""
    where, result = f"{moved}{printable(part.instance_id)}{why}", part.result
    if result is None:
        return where, f"no token of {part.max_tokens:,}: {printable(part.end)}", "", ""
    rate = result.tokens / (part.end_s - part.begin_s) if part.end_s > part.begin_s else 0.0
    kv = [
        f"{tokens:,} {source}"
        for source, tokens in (
            ("cached", result.cached_tokens),
            ("from the pool", result.pool_tokens),
            ("prefilled", result.prefilled_tokens),
        )
        if tokens
    ]
    drafts = f"{result.accepted:,} of {result.drafted:,} accepted" if result.drafted else ""
    what = f"{result.tokens:,} of {part.max_tokens:,} tokens, {rate:.1f} a second: {part.end}"
    return where, what, ", ".join(kv), drafts


def sums(life: RequestLife) -> str:
    """Return the sum of it all."""
    earlier = life.earlier_tokens
    if earlier and life.finished_s is not None and not life.parts:
        return f"{earlier:,} tokens, all from before the run was resumed; its trace begins there"
    waited = life.waited_s()
    ran_s = sum(each.end_s - each.begin_s for each in life.chunks)
    instances = len({each.instance_id for each in life.chunks})
    answers = f", and {life.answer_tokens:,} from its environment" if life.answer_tokens else ""
    before = f" after {earlier:,} from before the run was resumed" if earlier else ""
    parts = (
        f"waited {sum(waited.values()):.2f} s"
        + (f" ({lacks(waited)})" if waited else "")
        + f", ran {ran_s:.2f} s in {len(life.chunks)} chunks on {counted(instances, 'instance')}"
    )
    if life.finished_s is None:
        return (
            f"{life.tokens:,} tokens{answers}{before} so far, as the trace ends before the response; {parts}"
        )
    return (
        f"{life.tokens:,} tokens{answers}{before} in {life.finished_s - life.submitted_s:.2f} s,"
        f" finish reason {life.finish_reason}, number {len(life.siblings_done) + 1} of its group to finish;"
        f" {parts}"
    )


def lacks(causes: Mapping[Cause, float]) -> str:
    """Return how long a request waited for what, the longest first."""
    longest = sorted(causes.items(), key=lambda each: -each[1])
    return ", ".join(f"{seconds:.2f} s {LACKS[cause]}" for cause, seconds in longest)


def lacking(counts: Mapping[Cause, int]) -> str:
    """Return how many requests wait for what now, in the order given."""
    return ", ".join(f"{count:,} {LACKED_NOW[cause]}" for cause, count in counts.items())


def counted(count: int, what: str) -> str:
    """Return a number and its noun, in the plural where it is not 1."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
