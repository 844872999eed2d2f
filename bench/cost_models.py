"""How well does the simulator's cost model predict steps that others have measured?

Rows are of AIConfigurator's `silicon_sample.csv` (github.com/ai-dynamo/aiconfigurator, Apache-2.0): times per
output token of vLLM and SGLang on H100 and H200, with a constant number of requests in flight.  ``--data``
names a folder with our selection of them.  A set is one model, GPU and engine.  Its constants are shares of
the GPU's peaks and times per step, layer, all-reduce, request and position; sizes are from the model's
config.json.  Each half of a set is predicted by a fit to the other half, and each number of GPUs by a fit to
the others.  Constants on which rows say nothing stay near typical ones.  *Without rows* has those alone.

Rows are set aside before any fit where their batch cannot have run: its KV exceeds the GPUs' memory, half of
it waits for the first token (Little's law), or a batch no smaller takes less time under the same conditions.
Rows whose attention or experts are not divided by tensor parallelism alone are not read.

With ``--gains`` recorded lengths run on four simulated instances at pressure 4, under the constants that were
fitted to the paper and under measured ones.  A round is an iteration of the recording; figures are times
veRL's speed.  A step that drafts takes 10 ms more under the paper's constants, as there, and under measured
ones 0.4 ms and 0.08 ms for each request (gpu-h100.md).  The acceptance of drafts is the paper's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from seer_cli.stats import ratios
from seer_lab.policies import POLICIES
from seer_lab.simulate import simulate
from seer_lab.step_fit import StepFit, errors_of, fit_steps, held_out
from seer_lab.step_rows import StepRow, aside, gpu_of, read_rows
from seer_lab.traces import read_lengths
from seer_lab.workloads import CLUSTERS, crowded
from seer_sim.machines import TYPICAL
from seer_sim.published import CONFIGS
from seer_sim.sizes import sizes_of

from bench.harness import Row, cell, markdown, percent, spread_of

DEPENDS_ON = ("backends/sim", "lab", "plugins/divided_rollout", "plugins/context_sched")
ROUNDS = 3

SETS = {
    "h100-qwen3-32b-tp4": ("Qwen/Qwen3-32B", "h100_sxm", "backend=vllm", "gemm_quant_mode="),
    "h100-qwen3-32b-sglang": ("Qwen/Qwen3-32B", "h100_sxm", "backend_version=0.5.1.post1"),
    "h200-llama-3.1-8b": ("meta-llama/Llama-3.1-8B-Instruct", "h200_sxm"),
    "h100-gpt-oss-120b-tp4": ("openai/gpt-oss-120b", "h100_sxm"),
    "h200-gpt-oss-120b-tp4": ("openai/gpt-oss-120b", "h200_sxm"),
    "h100-minimax-m2.5": ("MiniMaxAI/MiniMax-M2.5", "h100_sxm"),
    "h200-minimax-m2.5-tp4": ("MiniMaxAI/MiniMax-M2.5", "h200_sxm", "backend_version=0.16.0"),
    "h200-minimax-m2.5-tp8": ("MiniMaxAI/MiniMax-M2.5", "h200_sxm", "backend_version=0.18.0"),
    "h200-qwen3-235b-tp4": ("Qwen/Qwen3-235B-A22B-FP8", "h200_sxm", "backend=vllm"),
    "h200-qwen3-235b-sglang": ("Qwen/Qwen3-235B-A22B-FP8", "h200_sxm", "backend=sglang"),
    "h200-deepseek-v3-tp8": ("deepseek-ai/DeepSeek-V3", "h200_sxm"),
    "h200-kimi-k2.5-tp8": ("moonshotai/Kimi-K2.5", "h200_sxm"),
    "h200-glm-5": ("zhipuai/GLM-5", "h200_sxm"),
}
"""Sets by name, that of the preset where there is one: model, GPU, and which other rows."""

TYPICAL_SEEN = 0.8
"""The share of others' prompts that falls between a response's tokens, where no row says (a usual one)."""

GOAL_MEAN, GOAL_WORST = 0.05, 0.15

ON = ("qwen2-vl-72b", "qwen3-32b")
"""Instances of the gains, those of the paper first."""

RECORDED = ("deepcoder-14b", "dapo-32b")
"""Workloads of recorded lengths."""

BASELINE = "verl"
POLICY_NAMES = (BASELINE, "posterior", "posterior+sd")
INSTANCES, PRESSURE = 4, 4.0


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--data", type=Path, required=True, help="folder of data that is not published")
    parser.add_argument("--gains", action="store_true", help="simulate gains, in place of fitting")


def run(options: argparse.Namespace) -> list[Row]:
    """Fit every set, or simulate every workload under every policy on all instances."""
    if not options.gains:
        return [_fitted(name, options.data) for name in SETS]
    rows = []
    for workload in RECORDED:
        for on in ON:
            rows.append(_gains(workload, on, options.data, options.rounds))
            print(f"{workload} on {on}", file=sys.stderr, flush=True)
    return rows


def _fitted(name: str, data: Path) -> Row:
    """Return the rows of a set, its fit, and how far predictions of rows left out are off."""
    model, system, *others = SETS[name]
    where = [f"model_path={model}", f"system={system}", *others]
    found, _ = read_rows(data / "silicon_hopper.csv", where)
    sizes, gpu = sizes_of(CONFIGS[model]), gpu_of(system)
    left = dict(aside(found, sizes, gpu))
    kept = [row for row in found if row not in left]
    fitted = fit_steps(kept, sizes, gpu)
    typical = StepFit(TYPICAL, TYPICAL_SEEN)
    return {
        "set": name,
        "model": model,
        "gpu": system.partition("_")[0],
        "rows": [list(row) for row in kept],
        "aside": [[*row, reason] for row, reason in left.items()],
        "reached": msgspec.to_builtins(fitted.reached),
        "seen": fitted.seen,
        "fitted": msgspec.to_builtins(errors_of(fitted, kept, sizes, gpu)),
        "held_out": msgspec.to_builtins(list(held_out(kept, sizes, gpu))),
        "without_rows": msgspec.to_builtins(errors_of(typical, kept, sizes, gpu)),
    }


def _gains(name: str, on: str, data: Path, rounds: int) -> Row:
    """Return each policy's speed over the baseline's, seed by seed."""
    lengths = read_lengths(data / "rollout_lengths.jsonl", [f"workload={name}"])
    load = crowded(name, lengths, CLUSTERS[on], INSTANCES, PRESSURE)
    seconds = {
        policy: [simulate(load, POLICIES[policy], seed).summary.total_time_s for seed in range(rounds)]
        for policy in POLICY_NAMES
    }
    return {
        "workload": name,
        "on": on,
        "total_time_s": {policy: spread_of(took) for policy, took in seconds.items()},
        "speed": {policy: spread_of(ratios(seconds[BASELINE], took)) for policy, took in seconds.items()},
    }


def rows_of(row: Row) -> list[StepRow]:
    """Return the measured rows of a set's stored row."""
    return [StepRow(*each) for each in row["rows"]]


def meets_goal(row: Row) -> bool:
    """Return whether each half, and a number of GPUs if there are several, is predicted within the goal."""
    within = {
        each["what"]: each["errors"]["mean"] < GOAL_MEAN and each["errors"]["worst"] < GOAL_WORST
        for each in row["held_out"]
    }
    halves = [found for what, found in within.items() if what.startswith("half")]
    others = [found for what, found in within.items() if not what.startswith("half")]
    return all(halves) and (not others or any(others))


def table(rows: Sequence[Row]) -> str:
    """Return one line for each set, or one for each workload and instances."""
    return _table_of_fits(rows) if "set" in rows[0] else _table_of_gains(rows)


def _table_of_fits(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        held = {each["what"]: each["errors"] for each in row["held_out"]}
        others = [f"{what}: {_errors(each)}" for what, each in held.items() if not what.startswith("half")]
        lines.append(
            [
                row["set"],
                f"{row['fitted']['rows']} of {row['fitted']['rows'] + len(row['aside'])}",
                *(_errors(each) for each in (row["fitted"], held["half 1"], held["half 2"])),
                ", ".join(others),
                _errors(row["without_rows"]),
                "yes" if meets_goal(row) else "no",
            ]
        )
    columns = [
        "set",
        "rows",
        "fitted",
        "half 1",
        "half 2",
        "numbers of GPUs left out",
        "without rows",
        "goal",
    ]
    title = "Mean and worst error, in percent; the goal is 5 and 15 on both halves and on a number of GPUs:"
    return f"{title}\n\n{markdown(columns, lines)}"


def _table_of_gains(rows: Sequence[Row]) -> str:
    lines = [
        [row["workload"], row["on"], *(cell(row["speed"][policy], ".2f") for policy in POLICY_NAMES[1:])]
        for row in rows
    ]
    return markdown(["lengths", "on", *POLICY_NAMES[1:]], lines, left=2)


def _errors(errors: Row) -> str:
    return f"{100 * errors['mean']:.1f} / {100 * errors['worst']:.0f}"


def answer(rows: Sequence[Row]) -> str:
    """Return how many sets meet the goal, or how gains change with measured constants."""
    if "set" in rows[0]:
        good = sum(map(meets_goal, rows))
        return (
            f"Of {len(rows)} sets of step times that others have measured on H100 and H200, {good} are"
            " predicted within 5 % on average and 15 % at worst, each row by a fit to others."
        )
    saved = {}
    for on in ON:
        for policy in POLICY_NAMES[1:]:
            found = [1 - 1 / row["speed"][policy]["median"] for row in rows if row["on"] == on]
            saved[on, policy] = f"{percent(min(found))} to {percent(max(found))}"
    return (
        f"On recorded lengths scheduling takes {saved[ON[0], 'posterior']} less time than veRL's policy with"
        f" the paper's constants, and {saved[ON[1], 'posterior']} with measured ones. With drafts it takes"
        f" {saved[ON[0], 'posterior+sd']} less and {saved[ON[1], 'posterior+sd']}."
    )
