"""What does Seer add to a step on a GPU, as far as it can be counted without one?

Waits: real engines step on a CPU, and what stands in for their samplers works on a device that is not there,
where each wait of the host is counted (``device_waits``): a tensor that is read, a copy from memory that is
not pinned, a shape that depends on numbers.  The engine's own waits are not in it.  Sampler: its CPU time for
rows of 151,936 logits, one thread, and the instructions of its kernels for each logit, compiled for an H100.
With --against the same is done with the packages of another checkout, in turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.draft_step import HERE, SECOND, checkouts, printed
from bench.harness import Row, cell, markdown, percent, spread_of, turned

DEPENDS_ON = ("backends/worker/seer_worker/sampling", "backends/vllm", "backends/sglang")
ROUNDS = 1
TARGET = "sm_90"
BATCH, DRAFTS, STEPS = 8, 4, 10
SAMPLER = "sampler"


def options(parser: argparse.ArgumentParser) -> None:
    """Add the part's own options."""
    parser.add_argument("--engine", nargs="*", default=["vllm", SECOND, "sglang"])
    parser.add_argument("--rows", type=int, default=256, help="of logits, whose choice is timed")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout of the project")


def waits_of(engine: str, checkout: Path) -> list[Row]:
    """Return the waits of a step of an engine that can draft, with and without drafts."""
    sizes = ["--batch", str(BATCH), "--steps", str(STEPS), "--drafts", "0", str(DRAFTS)]
    return printed(engine, ["--waits", *sizes], checkout)


def run(options: argparse.Namespace) -> list[Row]:
    """Count the waits, compile the kernels, and time the choices, under each checkout in turns."""
    places = checkouts(options)
    rows: list[Row] = []
    for name, checkout in places.items():
        for engine in options.engine:
            rows += (
                {"of": "waits", "engine": engine, "checkout": name, **row}
                for row in waits_of(engine, checkout)
            )
        kernels = printed(SAMPLER, ["--kernels", TARGET], checkout)
        rows += ({"of": "kernels", "checkout": name, **row} for row in kernels)
    times: dict[tuple[str, str], list[float]] = {}
    tokens: dict[str, set[int]] = {}
    for _, name in turned([*places], options.rounds):
        for row in printed(SAMPLER, ["--rows", str(options.rows)], places[name]):
            times.setdefault((row["cuts"], name), []).append(row["cpu_s"])
            tokens.setdefault(row["cuts"], set()).add(row["tokens"])
    for cuts, found in tokens.items():
        if len(found) > 1:
            raise SystemExit(f"the checkouts choose other tokens: {cuts}")
    rows += (
        {"of": "choice", "cuts": cuts, "checkout": name, "rows": options.rows, "cpu_s": spread_of(found)}
        for (cuts, name), found in times.items()
    )
    return rows


def answer(rows: Sequence[Row]) -> str:
    """Return the most waits of each engine, with drafts or without, and what top-p adds to the sampler."""
    waits: dict[str, list[int]] = {}
    for row in rows:
        if row["of"] == "waits" and row["checkout"] == HERE:
            waits.setdefault(row["engine"], []).append(row["waits"])
    each = ", ".join(f"{max(found)} on {engine}" for engine, found in waits.items())
    times = {
        row["cuts"]: row["cpu_s"]["median"]
        for row in rows
        if row["of"] == "choice" and row["checkout"] == HERE
    }
    counted = f"The host's waits for the device in Seer's part of a step are {each}. " if each else ""
    top_p = times["top-p"] / times["none"] - 1
    return f"{counted}On a CPU a choice with top-p takes {percent(top_p)} more time than one without."


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    waits = [row for row in rows if row["of"] == "waits"]
    found = [
        markdown(
            ("engine", "packages", "drafts of each request", "for what", "waits of a step"),
            (
                (
                    row["engine"],
                    row["checkout"],
                    str(row["drafts"]),
                    ", ".join(f"{name}: {count}" for name, count in row["for"].items()),
                    str(row["waits"]),
                )
                for row in sorted(waits, key=lambda row: row["engine"])
            ),
            left=4,
        )
    ]
    kernels = [row for row in rows if row["of"] == "kernels"]
    found.append(
        markdown(
            ("kernel", "packages", "instructions", "by the logits of a thread", "registers"),
            (
                (
                    row["kernel"],
                    row["checkout"],
                    str(row["instructions"]),
                    "" if row["per_logit"] is None else f"{row['per_logit']:.0f}",
                    str(row["registers"]),
                )
                for row in kernels
            ),
            left=2,
        )
    )
    choices = [row for row in rows if row["of"] == "choice"]
    found.append(
        markdown(
            ("cuts", "rows", "packages", "a choice on a CPU, ms"),
            (
                (
                    row["cuts"],
                    str(row["rows"]),
                    row["checkout"],
                    cell({name: value * 1e3 for name, value in row["cpu_s"].items()}, ",.0f"),
                )
                for row in sorted(choices, key=lambda row: row["cuts"])
            ),
            left=3,
        )
    )
    return "\n\n".join(found if waits else found[1:])
