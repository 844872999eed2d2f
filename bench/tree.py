"""What has the restructuring of the tree changed: lines, settings, commands, start-up and decisions?

Two checkouts are compared, each with the light environment of its own (`make setup-core`): this one, and one
of an earlier commit.  Lines of code are those of Python without blank lines, comments and docstrings; tests
and examples count apart.  Settings and commands are the rows and headings of the generated reference of each
checkout.  Commands and decisions are measured in turns, in CPU time, user and system, so that a wait for a
core does not count.  A decision is that of the steady load of `driver scheduler`, 10,000 requests on
100 instances, in the fastest twentieth of slices.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import subprocess
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness import ROOT, Row, cell, markdown, spread_of, turned

DEPENDS_ON = ("bench/tree.py",)
"""The pages say what each figure was at its commit, so no later change makes it stale."""
ROUNDS = 6

COMMANDS: Mapping[str, Sequence[str]] = {
    "an empty Python": ("python", "-c", "pass"),
    "`import seer_core`": ("python", "-c", "import seer_core"),
    "`seer --help`": ("seer", "--help"),
    "`seer sim`, one policy on a tiny load": (
        *("seer", "sim", "qwen2-vl-72b", "--scale", "0.01"),
        *("--policy", "context"),
    ),
}
LOAD = ("--queued", "10000", "--instances", "100", "--events", "4000", "--warmup", "4000", "--rounds", "1")
SIDE = {"tests", "test_support", "examples"}
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
KEY, COMMAND = re.compile(r"^\| `[^`]+` \|", re.M), re.compile(r"^## ", re.M)


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what would lead one checkout to the other's packages."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def git_in(folder: Path, *arguments: str) -> str:
    """Return what git prints about a checkout."""
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def code_lines(text: str) -> int:
    """Return the lines of a module that hold code."""
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        for each in getattr(node, "body", ()) if not isinstance(node, (ast.Lambda, ast.IfExp)) else ():
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                docs.update(range(each.lineno, (each.end_lineno or each.lineno) + 1))
    found = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - docs)


def lines_of(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield each folder at the top of a checkout and the lines of code of a file in it."""
    for name in git_in(folder, "ls-files", "*.py").splitlines():
        top, *parts = name.split("/")
        if parts:
            side = top in SIDE or not SIDE.isdisjoint(parts) or parts[-1].startswith(("test_", "conftest"))
            yield "tests and examples" if side else f"`{top}`", code_lines((folder / name).read_text())


def counts(folder: Path) -> dict[str, int]:
    """Return what a checkout has, by the name of the figure."""
    lines: Counter[str] = Counter()
    for top, each in lines_of(folder):
        lines[f"lines of code, {top}"] += each
    reference = folder / "docs" / "reference"
    return {
        **dict(sorted(lines.items())),
        "settings": len(KEY.findall((reference / "settings.md").read_text())),
        "commands": len(COMMAND.findall((reference / "commands.md").read_text())),
    }


def cpu_s(folder: Path, words: Sequence[str]) -> float:
    """Return the CPU seconds of a command in a checkout's light environment, and of what it started."""
    program = folder / ".venv-core" / "bin" / words[0]
    with open(os.devnull, "wb") as nowhere:
        child = subprocess.Popen(
            [program, *words[1:]], cwd=folder, env=clean_environment(), stdout=nowhere, stderr=nowhere
        )
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{program} {' '.join(words[1:])} ended with status {child.returncode}")
    return usage.ru_utime + usage.ru_stime


def decision_us(folder: Path) -> dict[str, float]:
    """Return the microseconds of a decision in each phase of the load, as a checkout measures it."""
    case = ["driver", "scheduler"] if (folder / "bench" / "cases.py").exists() else ["scheduler"]
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "rows.json"
        command = [folder / ".venv-core" / "bin" / "python", "-m", "bench", *case, *LOAD, "--json", file]
        subprocess.run(command, cwd=folder, env=clean_environment(), check=True, capture_output=True)
        rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return {row["phase"]: row["quiet_us"] for row in rows if row["gc"] == "frozen"}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the earlier commit")


def run(options: argparse.Namespace) -> list[Row]:
    """Count and measure both checkouts."""
    trees = {"before": options.before.resolve(), "now": ROOT}
    rows: list[Row] = [
        {
            "figure": "commit",
            **{arm: git_in(tree, "rev-parse", "--short=9", "HEAD") for arm, tree in trees.items()},
        }
    ]
    found = {arm: counts(tree) for arm, tree in trees.items()}
    names = dict.fromkeys([*found["now"], *found["before"]])
    rows += [{"figure": name, **{arm: found[arm].get(name, 0) for arm in trees}} for name in names]
    measured: dict[tuple[str, str], list[float]] = {}
    for number, arm in turned(list(trees), options.rounds, warm_up=1):
        times = {f"{name}, s": cpu_s(trees[arm], words) for name, words in COMMANDS.items()}
        phases = decision_us(trees[arm]) if number >= 0 else {}
        times |= {f"a decision, {phase}, us": each for phase, each in phases.items()}
        if number >= 0:
            for name, each in times.items():
                measured.setdefault((name, arm), []).append(each)
    timed = dict.fromkeys(name for name, _ in measured)
    return rows + [
        {"figure": name, **{arm: spread_of(measured[name, arm]) for arm in trees}} for name in timed
    ]


def table(rows: Sequence[Row]) -> str:
    """Return one line for each figure."""

    def shown(value: Any) -> str:
        if isinstance(value, str):
            return value
        return f"{value:,}" if isinstance(value, int) else cell(value, ",.2f")

    return markdown(
        ["figure", "before", "now"],
        [[row["figure"], shown(row["before"]), shown(row["now"])] for row in rows],
    )


def answer(rows: Sequence[Row]) -> str:
    """Return what has changed most for a reader and for a user."""
    found = {row["figure"]: row for row in rows}

    def of(name: str) -> tuple[Any, Any]:
        return found[name]["before"], found[name]["now"]

    def median(name: str) -> tuple[float, float]:
        before, now = of(name)
        return before["median"], now["median"]

    core, settings, commands = of("lines of code, `seer_core`"), of("settings"), of("commands")
    start, helped = median("`import seer_core`, s"), median("`seer --help`, s")
    probes, groups = median("a decision, probes, us"), median("a decision, groups, us")
    return (
        f"Since {found['commit']['before']} the core has shrunk from {core[0]:,} lines of code to"
        f" {core[1]:,}. Settings went from {settings[0]} to {settings[1]} and commands from {commands[0]} to"
        f" {commands[1]}, with all that has been added since. `import seer_core` takes {start[1]:.2f} s of"
        f" CPU and took {start[0]:.2f} s; `seer --help` takes {helped[1]:.2f} s and took {helped[0]:.2f} s."
        f" A decision takes {min(probes[1], groups[1]):.1f} to {max(probes[1], groups[1]):.1f} us, and took"
        f" {min(probes[0], groups[0]):.1f} to {max(probes[0], groups[0]):.1f} us."
    )
