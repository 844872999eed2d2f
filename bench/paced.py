"""What does each technique buy on an emulated accelerator, under a real scheduler and in the simulator?

The scheduler is vLLM's, or with ``--engine paced-sglang`` SGLang's, which does not draft.  Steps take as long
as those of Qwen2-VL-72B on H800s, with costs fitted to the paper, or with ``--on qwen3-32b`` as those of
Qwen3-32B on 4 H100, with costs fitted to published measurements (cost_models.md).

``tiny-reasoner`` repeats the recorded responses of the bundled model (bench/data): 1,024 responses on two
instances, with KV for a quarter of the text.  So an instance has about as many responses, and KV for about as
many of them, as in the paper's run of Qwen2-VL-72B: 512 and 132 here, 600 and 128 there.  Responses are about
ten times shorter than a reasoning model's, so a token of context costs ten times as much.  Drafts come from
the real index and from the text itself; the simulator gets the acceptance that these drafts had.

Other workloads are the paper's, and recorded lengths.  Their contexts and KV are smaller by the factor in a
row's name, and a token of context costs as many times more, so a step takes as long as before.  Data for
deepcoder-14b, dapo-32b, recorded-text and whole-text is not published: ``--data`` names a folder that has it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
from seer_cli.stats import ratios
from seer_lab.emulated import CompletionLog, dearer
from seer_lab.lengths import DrawnLengths, GroupLengths
from seer_lab.paced import SCHEDULERS
from seer_lab.policies import POLICIES
from seer_lab.simulate import SimulatedIteration, simulate
from seer_lab.texts import RecordedText
from seer_lab.traces import read_lengths
from seer_lab.twin import drafts_of
from seer_lab.workloads import CLUSTERS, WORKLOADS, Workload, crowded, scaled

from bench.harness import DATA, Row, cell, grouped, markdown, percent

DEPENDS_ON = (
    "seer_core",
    "plugins",
    "backends/sim",
    "backends/vllm",
    "backends/sglang",
    "backends/worker",
    "backends/paced",
    "lab",
    "bench/data",
)
ROUNDS = 1

UNPUBLISHED = "grouped_responses.npz"
BASELINE = "verl"
POLICY_NAMES = (BASELINE, "divided", "context", "oracle")
BLOCK_TOKENS = 16
PRESSURE = 4.0
PAPER, MEASURED = "qwen2-vl-72b", "qwen3-32b"
"""Instances whose costs are fitted to the paper, and to published measurements."""
TINY_FACTOR = 10
"""How many times shorter the bundled model's responses are than a reasoning model's."""
END_ID, FIRST_ID = 2, 3
"""Of recorded text: the token that ends it, and the least id of a word."""


def shrunk(workload: Workload, by: int) -> Workload:
    """Return the workload with contexts and KV so many times smaller, and each of their tokens dearer."""
    lengths: Any = workload.lengths
    if isinstance(lengths, DrawnLengths):
        lengths = msgspec.structs.replace(
            lengths,
            mean_tokens=lengths.mean_tokens / by,
            cap_tokens=lengths.cap_tokens // by,
            prompt_tokens=max(BLOCK_TOKENS, lengths.prompt_tokens // by),
        )
    else:
        lengths = [[_shorter(group, by) for group in groups] for groups in lengths]
    tables = dearer(workload.tables, by)
    engine = tables["engine"]["sim"]
    for name in ("kv_capacity_tokens", "max_model_tokens"):
        engine[name] = -(-engine[name] // by // BLOCK_TOKENS) * BLOCK_TOKENS + BLOCK_TOKENS
    return Workload(f"{workload.name} / {by}", lengths, tables)


def _shorter(group: GroupLengths, by: int) -> GroupLengths:
    return GroupLengths(
        group.id,
        max(BLOCK_TOKENS, group.prompt_tokens // by),
        tuple(max(1, tokens // by) for tokens in group.output_tokens),
        max(1, group.max_tokens // by),
    )


def _named(name: str, on: str) -> str:
    return name if on == PAPER else f"{name} on {on}"


def recorded(data: Path, name: str, instances: int, by: int, on: str = PAPER) -> Workload:
    """Return the recorded lengths of a workload on so many instances."""
    lengths = read_lengths(data / "rollout_lengths.jsonl", [f"workload={name}"])
    return shrunk(crowded(_named(name, on), lengths, CLUSTERS[on], instances, PRESSURE), by)


def recorded_text(file: Path, name: str, keep: int, by: int, instances: int = 4, on: str = PAPER) -> Workload:
    """Return recorded responses, one ``keep``-th of each, with tokens of context ``by`` times as dear."""
    found = np.load(file)
    ends = found["offsets"]
    prompts: dict[str, tuple[int, ...]] = {}
    responses: dict[str, tuple[int, ...]] = {}
    for number, (group, index) in enumerate(zip(found["group"], found["response"], strict=True)):
        tokens = (found["tokens"][ends[number] : ends[number + 1]].astype(int) + FIRST_ID).tolist()
        if index < 0:
            prompts[f"g{group}"] = tuple(tokens)
        else:
            responses[f"g{group}/{index}"] = (*tokens[: max(1, len(tokens) // keep)], END_ID)
    lengths: dict[str, list[int]] = {group: [] for group in prompts}
    for request, text in responses.items():
        lengths[request.rpartition("/")[0]].append(len(text))
    longest = max(map(max, lengths.values()))
    groups = [GroupLengths(each, len(prompts[each]), tuple(lengths[each]), longest) for each in prompts]
    load = crowded(_named(name, on), [groups], CLUSTERS[on], instances, PRESSURE)
    return msgspec.structs.replace(
        load, tables=dearer(load.tables, by), text=RecordedText(prompts, responses)
    )


def _on_paper_s(make: Callable[[Path, str], Workload], data: Path) -> Workload:
    return make(data, PAPER)


RECORDED: Mapping[str, Callable[[Path, str], Workload]] = {
    "tiny-reasoner": lambda data, on: recorded_text(DATA, "tiny reasoner's text", 1, TINY_FACTOR, 2, on),
    "deepcoder-14b": lambda data, on: recorded(data, "deepcoder-14b", 2, 8, on),
    "dapo-32b": lambda data, on: recorded(data, "dapo-32b", 2, 2, on),
    "recorded-text": lambda data, on: recorded_text(data / UNPUBLISHED, "recorded text / 5", 5, 5, on=on),
    "whole-text": lambda data, on: recorded_text(data / UNPUBLISHED, "recorded text", 1, 1, on=on),
}
"""Workloads that run on instances of any model."""

LOADS: Mapping[str, Callable[[Path], Workload]] = {
    **{name: partial(_on_paper_s, make) for name, make in RECORDED.items()},
    "moonlight": lambda data: shrunk(scaled(WORKLOADS["moonlight"], 1 / 8), 40),
    "qwen2-vl-72b": lambda data: shrunk(scaled(WORKLOADS["qwen2-vl-72b"], 1 / 8), 40),
    "qwen2-vl-72b-full": lambda data: shrunk(WORKLOADS["qwen2-vl-72b"], 40),
    "kimi-k2": lambda data: shrunk(scaled(WORKLOADS["kimi-k2"], 1 / 4), 200),
}


def measure(
    load: Workload, policy: str, seed: int, overrides: Sequence[str], engine: str = "paced"
) -> dict[str, Any]:
    """Roll out one iteration on both engines and return their figures."""
    notes = CompletionLog()
    paced = simulate(load, POLICIES[policy], seed, overrides, [notes], engine)
    measured = load
    if paced.summary.drafted_tokens:
        measured = msgspec.structs.replace(load, tables=_with_drafts(load.tables, notes))
    simulated = simulate(measured, POLICIES[policy], seed, overrides)
    row = {"case": load.name, "policy": policy, "seed": seed, "engine": engine}
    return row | {"paced": figures(paced), "sim": figures(simulated)}


def _with_drafts(tables: Mapping[str, Any], notes: CompletionLog) -> dict[str, Any]:
    """Return tables in which drafts are accepted, and cost, as on the paced engine."""
    drafts = drafts_of(notes.completions, 0.0, selective=True)
    assert drafts is not None
    engine = tables["engine"]["sim"]
    rows = ("siblings",) if drafts.tokens is None else ("siblings", "tokens")
    worth = {name: getattr(drafts, name) for name in (*rows, "rates", "verified")}
    return {**tables, "engine": {"sim": {**engine, "acceptance": {**engine["acceptance"], **worth}}}}


def figures(run: SimulatedIteration) -> dict[str, Any]:
    """Return the figures that are compared."""
    names = ("total_time_s", "tail_time_s", "throughput_tokens_per_s", "tokens", "chunks", "preemptions")
    names += ("recomputed_tokens", "pool_tokens", "migrations", "acceptance_length")
    found = {name: getattr(run.summary, name) for name in names}
    return found | {"wall_s": run.wall_s}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    names = list(LOADS)
    parser.add_argument("--only", nargs="+", choices=names, default=names[:1], help=f"(default {names[0]})")
    parser.add_argument(
        "--policy",
        nargs="+",
        choices=POLICIES,
        metavar="POLICY",
        help="these policies only; ratios are to the first",
    )
    parser.add_argument("--engine", choices=list(SCHEDULERS), default="paced", help="whose scheduler it is")
    parser.add_argument("--data", type=Path, default=DATA.parent, help="folder of data that is not published")
    parser.add_argument("--on", choices=(PAPER, MEASURED), default=PAPER, help=f"(default {PAPER})")
    parser.add_argument("--first-seed", type=int, default=0, help="rounds are seeds from this one on")


def run(options: argparse.Namespace) -> list[Row]:
    """Roll out every workload under every policy and every seed; a seed chooses lengths or prompts."""
    rows = []
    for name in options.only:
        load = RECORDED[name](options.data, options.on) if name in RECORDED else LOADS[name](options.data)
        policies = options.policy or POLICY_NAMES
        if load.text is not None and not options.policy and options.engine == "paced":
            policies = (*POLICY_NAMES[:-1], "seer", POLICY_NAMES[-1])
        for policy in policies:
            for seed in range(options.first_seed, options.first_seed + options.rounds):
                rows.append(measure(load, policy, seed, options.set, options.engine))
                total_s, wall_s = (rows[-1]["paced"][each] for each in ("total_time_s", "wall_s"))
                print(
                    f"{name}, {policy}: {total_s:.1f} s emulated in {wall_s:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
    return rows


def compared(rows: Sequence[Row], first: Sequence[Row], engine: str, figure: str) -> list[float]:
    """Return a figure's ratios to the baseline, seed by seed."""
    return ratios((row[engine][figure] for row in rows), (row[engine][figure] for row in first))


def table(rows: Sequence[Row]) -> str:
    """Return one line for each workload and policy: paced, simulated, and how far apart they are."""
    columns = ["workload", "policy"]
    for engine in ("paced", "simulated"):
        columns += [f"{engine}: total, s", "speed-up", "tail"]
    lines = []
    for case, policies in grouped(rows, "case", "policy").items():
        first = next(iter(policies.values()))
        for policy, mine in policies.items():
            line = [case if mine is first else "", policy]
            for engine in ("paced", "sim"):
                line.append(cell([row[engine]["total_time_s"] for row in mine]))
                for figure in ("throughput_tokens_per_s", "tail_time_s"):
                    line.append(cell(compared(mine, first, engine, figure), ".2f", "x"))
            for figure in ("total_time_s", "tail_time_s"):
                line.append(cell([row["sim"][figure] / row["paced"][figure] - 1 for row in mine], "+.1%"))
            lines.append(line)
    return markdown([*columns, "total differs", "tail differs"], lines, left=2)


WHOLE = ("seer", "posterior+sd")
"""Policies with all techniques together."""


def answer(rows: Sequence[Row]) -> str:
    """Return what all techniques together save, or else the least gain, and how far the simulator is off."""
    apart = max(abs(row["sim"]["total_time_s"] / row["paced"]["total_time_s"] - 1) for row in rows)
    saved = []
    for case, policies in grouped(rows, "case", "policy").items():
        first = next(iter(policies.values()))
        for policy in WHOLE:
            if mine := policies.get(policy):
                time, tail = (
                    percent(1 - median(compared(mine, first, "paced", figure)))
                    for figure in ("total_time_s", "tail_time_s")
                )
                saved.append(f"{time} and {tail} on the {case}")
    found = (
        "Under a real scheduler on an emulated accelerator, all techniques shorten time and tail time by"
        f" {', and by '.join(saved)}"
        if saved
        else _least(rows)
    )
    return f"{found}. The simulator's total times are at most {100 * apart:.1f} % off."


def _least(rows: Sequence[Row]) -> str:
    """Return each policy's least median speed-up over the first one, and the workload that has it."""
    found: dict[str, tuple[float, str]] = {}
    for case, policies in grouped(rows, "case", "policy").items():
        baseline, *others = policies.items()
        for policy, mine in others:
            speed = median(compared(mine, baseline[1], "paced", "throughput_tokens_per_s"))
            found[policy] = min(found.get(policy, (speed, case)), (speed, case))
    words = ", ".join(f"{speed:.3f}x for `{policy}` ({case})" for policy, (speed, case) in found.items())
    return f"The least median speed-ups over {rows[0]['policy']} are {words}"
