"""``seer explain``: what happened to one request of a run, in words."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec
from rich.table import Table

from seer_cli.chunk_runs import ChunkRun
from seer_cli.common import main_options, table_console
from seer_cli.output import JSON_OPTION, TRACE, InputPath, check_writable, write_json
from seer_cli.request_life import Cause, RequestLife, Wait, life_of
from seer_core.errors import printable
from seer_core.scheduling.trace import read_trace

__all__ = ["explain_command"]

LACKS: dict[Cause, str] = {
    "slots": "for a slot",
    "kv": "for KV",
    "turn": "for its turn",
    "paused": "while the rollout was paused",
    "instances": "for an instance",
}


@click.command("explain")
@main_options
@click.argument("directory", type=InputPath())
@click.argument("request")
@JSON_OPTION
def explain_command(directory: Path, request: str, json_file: Path | None) -> None:
    """Say what happened to REQUEST, GROUP/INDEX, in the run of DIRECTORY: when it waited, for what, and where
    it ran.

    A wait is for a slot while every instance runs as many requests as it may, for KV while no instance with a
    free slot has room for the next chunk, and for its turn while one has: others were preferred.

    \b
    Example:
      seer explain out/first g17/3
    """
    check_writable(json_file)
    life = life_of(request, read_trace(directory / TRACE))
    if json_file is not None:
        write_json(
            json_file, {**msgspec.to_builtins(life), "tokens": life.tokens, "waited_s": life.waited_s()}
        )
    click.echo(_beginning(life))
    table = Table("at", "for", "where", "what", "KV of the context", "drafts")
    for part in life.parts:
        times = f"{part.begin_s - life.submitted_s:.2f} s", f"{part.end_s - part.begin_s:.2f} s"
        if isinstance(part, Wait):
            table.add_row(*times, "", f"waits {_lacks(part.causes_s)}", "", "")
        else:
            table.add_row(*times, *_chunk(part))
    table_console().print(table)
    click.echo(_end(life))


def _beginning(life: RequestLife) -> str:
    group = life.group
    return (
        f"{printable(life.request_id)}: one of {group.n} responses of at most {group.max_tokens:,} tokens"
        f" to a prompt of {group.prompt_tokens:,}"
    )


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


def _end(life: RequestLife) -> str:
    """Return the sum of it all."""
    waited = life.waited_s()
    ran_s = sum(each.end_s - each.begin_s for each in life.chunks)
    instances = len({each.instance_id for each in life.chunks})
    plural = "" if instances == 1 else "s"
    sums = (
        f"waited {sum(waited.values()):.2f} s"
        + (f" ({_lacks(waited)})" if waited else "")
        + f", ran {ran_s:.2f} s in {len(life.chunks)} chunks on {instances} instance{plural}"
    )
    if life.finished_s is None:
        return f"{life.tokens:,} tokens so far, as the trace ends before the response; {sums}"
    return (
        f"{life.tokens:,} tokens in {life.finished_s - life.submitted_s:.2f} s, finish reason"
        f" {life.finish_reason}, number {life.before_it + 1} of its group to finish; {sums}"
    )


def _lacks(causes: dict[Cause, float]) -> str:
    """Return how long a request waited for what, the longest first."""
    longest = sorted(causes.items(), key=lambda each: -each[1])
    return ", ".join(f"{seconds:.2f} s {LACKS[cause]}" for cause, seconds in longest)
