"""What does each technique buy on real engines, beside the baseline?

The bundled example's prompts on two instances of a real engine, under the baseline and under each technique
on top of the last, as `make demo` runs them: `seer compare examples/tiny_reasoner/demo.toml`.

The first table has the times of this machine, whose speed drifts: the fixed work in the workers, timed before
and after each arm, shows by how much.  The others have the same responses, lengths and text, on two emulated
instances each: virtual time, which is the same on any machine.  One is of Qwen3-32B on 4 H100, whose costs
are fitted to what others have measured of vLLM there (cost_models.md), the other of Qwen2-VL-72B on 8 H800,
whose costs are fitted to the paper (reproduction.md).  A step that drafts takes 0.4 ms more, and 0.08 ms for
each of its requests, as measured on an H100 (gpu-h100.md).  An instance's KV stands for what those GPUs hold,
0.7 and 1.1 million tokens, so a token of context weighs as many times more.  The bound is the least time that
any schedule takes (docs/explain/bound.md).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from bench.harness import EXAMPLE, Row, markdown, percent

DEPENDS_ON = (
    "seer_core",
    "backends/worker",
    "backends/vllm",
    "backends/sglang",
    "backends/kv_local",
    "plugins",
    "examples/tiny_reasoner",
)
ROUNDS = 2

FIGURES = {
    "throughput_tokens_per_s": ("tokens per second", ",.0f"),
    "total_time_s": ("total time, s", ",.1f"),
    "tail_time_s": ("tail time, s", ",.1f"),
    "preemptions": ("preemptions", ",.0f"),
    "recomputed_tokens": ("recomputed tokens", ",.0f"),
    "pool_tokens": ("tokens from the KV pool", ",.0f"),
    "chunks": ("chunks", ",.0f"),
    "migrations": ("migrations", ",.0f"),
    "acceptance_length": ("tokens per request and step", ".2f"),
    "drafting_share": ("step time spent drafting", ".1%"),
    "fixed_work_s": ("fixed work in the workers, s", ".2f"),
}
WITH_RATIOS = ("throughput_tokens_per_s", "total_time_s", "tail_time_s", "recomputed_tokens", "fixed_work_s")
EMULATED = ("throughput_tokens_per_s", "total_time_s", "tail_time_s", "preemptions", "acceptance_length")


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--engine", default="vllm", help="vllm or sglang (default vllm)")
    parser.add_argument("--config", type=Path, default=EXAMPLE / "demo.toml", help="as for seer compare")
    parser.add_argument("--prompts", type=Path, help="as for seer compare")


def run(options: argparse.Namespace) -> list[Row]:
    """Compare, and return a row for each arm."""
    command = [
        Path(sys.executable).with_name("seer"),
        "compare",
        options.config,
        "--repeat",
        str(options.rounds),
    ]
    for override in (f"seer.engine={options.engine}", *options.set):
        command += ["--set", override]
    if options.prompts:
        command += ["--prompts", options.prompts]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "arms.json"
        subprocess.run([*command, "--json", file], check=True)
        arms: list[Row] = msgspec.json.decode(file.read_bytes())
    return [
        {
            "engine": options.engine,
            "name": arm["name"],
            "tokens": arm["tokens"],
            "tokens_equal_to_baseline": arm["tokens_equal_to_baseline"],
            "rounds": arm["repeats"],
            "figures": {
                figure: {
                    "median": arm[figure],
                    "least": arm["spread"][figure][0],
                    "most": arm["spread"][figure][1],
                }
                for figure in FIGURES
                if figure in arm
            },
            "ratio_to_baseline": arm["ratio_to_baseline"],
            "probes": arm["probes"],
            "emulated": arm["emulated"],
        }
        for arm in arms
    ]


def table(rows: Sequence[Row]) -> str:
    """Return a column for each arm, on this machine and on the emulated accelerator."""
    parts = [_of_this_machine(rows)]
    for on in rows[0].get("emulated", ()):
        parts += [f"On emulated instances of {on}:", _emulated(rows, on)]
    return "\n\n".join(parts)


def _of_this_machine(rows: Sequence[Row]) -> str:
    lines = []
    for figure, (title, form) in FIGURES.items():
        if figure not in rows[0]["figures"]:
            continue
        cells = [title]
        for row in rows:
            found = row["figures"][figure]
            text = f"{found['median']:{form}}"
            ratio = row["ratio_to_baseline"].get(figure)
            if figure in WITH_RATIOS and row is not rows[0] and ratio is not None:
                text += f" ({ratio:.2f}x)"
            least, most = f"{found['least']:{form}}", f"{found['most']:{form}}"
            cells.append(f"{text} [{least}, {most}]" if least != most else text)
        lines.append(cells)
    lines.append(["same tokens", *("yes" if row["tokens_equal_to_baseline"] else "no" for row in rows)])
    return markdown(["", *(row["name"] for row in rows)], lines)


def _emulated(rows: Sequence[Row], on: str) -> str:
    lines = []
    for figure in EMULATED:
        title, form = FIGURES[figure]
        cells = [title]
        for row in rows:
            found = row["emulated"][on]
            ratio = found["ratio_to_baseline"].get(figure)
            shown = figure in WITH_RATIOS and row is not rows[0] and ratio is not None
            cells.append(f"{found[figure]:{form}}" + (f" ({ratio:.2f}x)" if shown else ""))
        lines.append(cells)
        if figure == "total_time_s":
            lines.append(["over its bound", *(f"{row['emulated'][on]['over_bound']:.2f}x" for row in rows)])
    return markdown(["", *(row["name"] for row in rows)], lines)


def one_number(rows: Sequence[Row]) -> str:
    """Return the number of the README: the time that all techniques save on the first emulated instances."""
    ratio = next(iter(_whole(rows)["emulated"].values()))["ratio_to_baseline"]
    return (
        f"A rollout with all techniques takes **{_less(ratio, 'total_time_s')} less time** than under veRL's"
        " policy,\nwith the same tokens, on two emulated instances of Qwen3-32B on 4 H100 each, whose step"
        " times\nare fitted to [published measurements](docs/results/predictions.md#cost_models); `make demo`"
        "\nprints it on any machine."
    )


def _whole(rows: Sequence[Row]) -> Row:
    """Return the arm with all techniques."""
    return [row for row in rows if row["name"] != "oracle"][-1]


def _less(ratios: Mapping[str, float], figure: str) -> str:
    return percent(1 - ratios[figure])


def answer(rows: Sequence[Row]) -> str:
    """Return what all techniques together save over the baseline, and how far the machine drifted."""
    row = _whole(rows)
    found = {
        f"emulated instances of {on}": its["ratio_to_baseline"] for on, its in row.get("emulated", {}).items()
    }
    found[f"real {row['engine']} on a CPU"] = row["ratio_to_baseline"]
    saved = [
        f"{_less(ratios, 'total_time_s')} and {_less(ratios, 'tail_time_s')} on {on}"
        for on, ratios in found.items()
    ]
    text = f"All techniques together shorten veRL's time and tail time by {'; by '.join(saved)}"
    if walls := [each["wall_s"] for row in rows for pair in row.get("probes", ()) for each in pair]:
        text += f", whose speed changed by {percent(max(walls) / min(walls) - 1)} meanwhile"
    same = "Every" if all(each["tokens_equal_to_baseline"] for each in rows) else "Not every"
    return f"{text}. {same} arm writes the same tokens."
