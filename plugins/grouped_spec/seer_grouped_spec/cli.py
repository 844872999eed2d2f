"""``seer replay``: would grouped drafting pay on these responses?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click
from rich.table import Table
from seer_cli.common import main_options
from seer_cli.output import InputPath, check_writable, write_json
from seer_cli.tables import print_table

from seer_core.errors import quote
from seer_grouped_spec.replay import Recording, ReplayError, ReplayRow, Siblings, load, replay

__all__ = ["replay_command"]

DEFAULT_SIBLINGS = (0, 1, 3, 7, 9)


@click.command("replay")
@main_options
@click.argument("file", type=InputPath())
@click.option(
    "--siblings",
    metavar="LIST",
    help='Finished siblings to draft from, and "live": all advance together.  [default: 0,1,3,7,9 as far'
    " as groups are large enough, and live]",
)
@click.option(
    "--draft-tokens",
    type=click.IntRange(1, 1024),
    default=8,
    show_default=True,
    metavar="N",
    help="The longest draft.",
)
@click.option(
    "--tree-nodes", type=click.IntRange(0, 1024), default=0, metavar="N", help="Draft trees of N tokens."
)
@click.option(
    "--paths", type=click.IntRange(0), default=0, metavar="N", help="Most paths of a tree; 0 is no limit."
)
@click.option(
    "--min-probability", type=click.FloatRange(0, 1), default=0.0, metavar="P", help="Cut weaker drafts."
)
@click.option("--control", is_flag=True, help="Take other prompts' responses for siblings.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Read only the first N groups.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write one object per row.")
def replay_command(
    file: Path,
    siblings: str | None,
    draft_tokens: int,
    tree_nodes: int,
    paths: int,
    min_probability: float,
    control: bool,
    limit: int | None,
    json_file: Path | None,
) -> None:
    """Replay the responses recorded in FILE through the draft index, without any engine.

    FILE is a run's completions.jsonl, JSON lines of {"group", "prompt_token_ids", "responses"}, or an
    .npz of tokens, offsets, group and response.  Acceptance length is tokens per step, the bonus token
    included: 1.00 is no gain, and what it must exceed depends on what a wider step costs the engine.

    \b
    Example:
      seer replay out/demo/completions.jsonl --siblings 0,3,7,live --min-probability 0.05
    """
    check_writable(json_file)
    recordings = load(file)[:limit]
    rows = []
    for setting in _siblings(siblings, recordings, control):
        rows += replay(
            recordings,
            (setting,),
            draft_tokens,
            tree_nodes,
            min_probability,
            control=control,
            paths=paths,
            progress=_show_progress,
        )
    if json_file is not None:
        write_json(json_file, rows)
    _print(rows, file)


def _siblings(text: str | None, recordings: Sequence[Recording], control: bool) -> list[Siblings]:
    if text is None:
        most = max(len(recording.responses) for recording in recordings) - 1
        most = len(recordings) - 1 if control else most
        fitting: list[Siblings] = [count for count in DEFAULT_SIBLINGS if count <= most]
        return fitting if control else [*fitting, "live"]
    wanted: list[Siblings] = []
    for word in text.split(","):
        word = word.strip()
        if word != "live" and not word.isdecimal():
            raise ReplayError(
                f"--siblings {quote(text)}: {quote(word)} is neither a number nor live; try 0,3,live"
            )
        wanted.append("live" if word == "live" else int(word))
    return wanted


def _show_progress(setting: str, done: int, of: int) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r{setting}: {done} of {of} groups ", err=True, nl=done == of)
    elif done == of:
        click.echo(f"{setting}: {of} groups", err=True)


def _print(rows: Sequence[ReplayRow], file: Path) -> None:
    what = (
        f"trees of {rows[0].tree_nodes} tokens"
        if rows[0].tree_nodes
        else f"paths of {rows[0].draft_tokens} tokens"
    )
    siblings = "other prompts' responses" if rows[0].control else "siblings"
    table = Table(title=f"{file.name}: {what}", title_justify="left")
    table.add_column(siblings, justify="right")
    for title in (
        "acceptance length",
        "drafted per step",
        "accepted / drafted",
        "groups",
        "responses",
        "tokens",
    ):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            str(row.siblings),
            f"{row.acceptance_length:.2f}",
            f"{row.drafted_per_step:.2f}",
            f"{row.accepted_share:.3f}",
            f"{row.groups:,}",
            f"{row.responses:,}",
            f"{row.tokens:,}",
        )
    print_table(table)
