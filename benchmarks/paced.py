"""A real scheduler on an emulated accelerator beside the simulator: same workloads, policies and costs.

It is vLLM's, or with ``--engine paced-sglang`` SGLang's, which does not draft.

The paper's workloads and recorded lengths, on two to four instances, and one workload on all its sixteen.
Contexts and KV are made so many times smaller as a case's name says, and what a token of context costs so
many times larger; so a step takes what it took.  "recorded text" repeats recorded responses, and
drafts from them with the real index; there the simulator is told what these drafts were worth.
"""

from __future__ import annotations

import argparse
import logging
import resource
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import structlog
from seer_lab.lengths import DrawnLengths, GroupLengths
from seer_lab.paced import SCHEDULERS
from seer_lab.policies import POLICIES
from seer_lab.simulate import Simulation, simulate
from seer_lab.texts import Text
from seer_lab.traces import read_lengths
from seer_lab.twin import drafts_of
from seer_lab.workloads import CLUSTERS, WORKLOADS, Workload, crowded, scaled
from seer_sim.cost import PRESETS
from seer_sim.pool import Settings as PoolSettings
from simulated import add_options, report

from seer_core.events import Command, Event
from seer_core.figures import ratios, spread
from seer_core.model import Completion

DATA = Path(__file__).parents[2] / "shared" / "data"
BASELINE = "verl"
POLICY_NAMES = (BASELINE, "divided", "context", "oracle")
BLOCK_TOKENS = 16
PRESSURE = 4.0
TEXT_INSTANCES = 4
END_ID, FIRST_ID = 2, 3
"""Of recorded text: what it ends with, and the least id of a word."""


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
    tables = _dearer(workload.tables, by)
    engine = tables["engine"]["sim"]
    for name in ("kv_capacity_tokens", "max_model_tokens"):
        engine[name] = -(-engine[name] // by // BLOCK_TOKENS) * BLOCK_TOKENS + BLOCK_TOKENS
    return Workload(f"{workload.name} / {by}", lengths, tables)


def _dearer(tables: Mapping[str, Any], by: int) -> dict[str, Any]:
    """Return tables in which a token of context costs so many times as much."""
    engine = dict(tables["engine"]["sim"])
    cost = PRESETS[engine["preset"]]
    engine["cost"] = {
        name: getattr(cost, name) * by
        for name in ("kv_bytes_per_token", "attention_flops", "prefill_attention_flops")
    }
    engine["report_interval_s"] = 1.0
    pool = dict(tables["kv_pool"]["sim_pool"])
    pool["bandwidth_bytes_per_s"] *= by  # as many bytes in so much less time
    pool["latency_s"] = PoolSettings().latency_s / by
    return {**tables, "engine": {"sim": engine}, "kv_pool": {"sim_pool": pool}}


def _shorter(group: GroupLengths, by: int) -> GroupLengths:
    return GroupLengths(
        group.id,
        max(BLOCK_TOKENS, group.prompt_tokens // by),
        tuple(max(1, tokens // by) for tokens in group.output_tokens),
        max(1, group.max_tokens // by),
    )


def recorded(data: Path, name: str, instances: int, by: int) -> Workload:
    """Return the recorded lengths of a workload on so many instances."""
    lengths = read_lengths(data / "rollout_lengths.jsonl", [f"workload={name}"])
    return shrunk(crowded(name, lengths, CLUSTERS["qwen2-vl-72b"], instances, PRESSURE), by)


def recorded_text(data: Path, by: int) -> Workload:
    """Return 25 groups of 10 responses with their text, of which only the beginnings are kept."""
    found = np.load(data / "grouped_responses.npz")
    ends = found["offsets"]
    prompts: dict[str, tuple[int, ...]] = {}
    responses: dict[str, tuple[int, ...]] = {}
    for number, (group, index) in enumerate(zip(found["group"], found["response"], strict=True)):
        tokens = (found["tokens"][ends[number] : ends[number + 1]].astype(int) + FIRST_ID).tolist()
        if index < 0:
            prompts[f"g{group}"] = tuple(tokens)
        else:
            responses[f"g{group}/{index}"] = (*tokens[: max(1, len(tokens) // by)], END_ID)
    lengths = {
        name: tuple(len(text) for each, text in responses.items() if each.rpartition("/")[0] == name)
        for name in prompts
    }
    longest = max(map(max, lengths.values()))
    groups = [GroupLengths(name, len(prompts[name]), lengths[name], longest) for name in prompts]
    load = crowded("recorded text", [groups], CLUSTERS["qwen2-vl-72b"], TEXT_INSTANCES, PRESSURE)
    return msgspec.structs.replace(
        load, name=f"{load.name} / {by}", tables=_dearer(load.tables, by), text=Text(prompts, responses)
    )


CASES: Mapping[str, Callable[[Path], Workload]] = {
    "moonlight": lambda data: shrunk(scaled(WORKLOADS["moonlight"], 1 / 8), 40),
    "qwen2-vl-72b": lambda data: shrunk(scaled(WORKLOADS["qwen2-vl-72b"], 1 / 8), 40),
    "qwen2-vl-72b-full": lambda data: shrunk(WORKLOADS["qwen2-vl-72b"], 40),
    "kimi-k2": lambda data: shrunk(scaled(WORKLOADS["kimi-k2"], 1 / 4), 200),
    "deepcoder-14b": lambda data: recorded(data, "deepcoder-14b", 2, 8),
    "dapo-32b": lambda data: recorded(data, "dapo-32b", 2, 2),
    "recorded-text": lambda data: recorded_text(data, 5),
    "whole-text": lambda data: recorded_text(data, 1),
}


def measure(
    load: Workload, policy: str, seed: int, overrides: Sequence[str], engine: str = "paced"
) -> dict[str, Any]:
    """Roll out one iteration on both engines and return their figures."""
    notes = Notes()
    paced = simulate(load, POLICIES[policy], seed, overrides, notes, engine)
    told = load
    if paced.summary.drafted_tokens:
        told = msgspec.structs.replace(load, tables=_told(load.tables, notes))
    simulated = simulate(told, POLICIES[policy], seed, overrides)
    row = {"case": load.name, "policy": policy, "seed": seed, "engine": engine}
    return row | {"paced": figures(paced), "sim": figures(simulated)}


class Notes:
    """An observer that keeps what a run says of its drafts."""

    def __init__(self) -> None:
        self.completions: list[Completion] = []

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Do nothing."""

    def completed(self, now: float, completion: Completion) -> None:
        """Keep a response."""
        self.completions.append(completion)


def _told(tables: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
    """Return tables in which drafts are worth what they were on the paced engine, and take what they take."""
    drafts = drafts_of(notes.completions, 0.0, selective=True)
    assert drafts is not None
    engine = tables["engine"]["sim"]
    rows = ("siblings",) if drafts.tokens is None else ("siblings", "tokens")
    worth = {name: getattr(drafts, name) for name in (*rows, "rates", "verified")}
    return {**tables, "engine": {"sim": {**engine, "acceptance": {**engine["acceptance"], **worth}}}}


def figures(run: Simulation) -> dict[str, Any]:
    """Return what is compared."""
    names = ("total_time_s", "tail_time_s", "throughput_tokens_per_s", "tokens", "chunks", "preemptions")
    names += ("recomputed_tokens", "pool_tokens", "migrations", "acceptance_length")
    found = {name: getattr(run.summary, name) for name in names}
    return found | {"wall_s": run.wall_s}


HEADER = """\
| workload | policy | paced: total, s | speed-up | tail | simulated: total, s | speed-up | tail | total differs | tail differs |
|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"""  # noqa: E501


def row_text(rows: Sequence[Mapping[str, Any]], first: Sequence[Mapping[str, Any]]) -> str:
    """Return one line of the table, of a policy's rows by seed: medians, and [least, most] of several."""
    cells = [rows[0]["case"] if rows is first else "", rows[0]["policy"]]
    for engine in ("paced", "sim"):
        runs, bases = ([row[engine] for row in each] for each in (rows, first))

        def over(name: str, runs: Any = runs, bases: Any = bases) -> list[float]:
            return ratios((run[name] for run in runs), (base[name] for base in bases))

        cells.append(cell([run["total_time_s"] for run in runs], ".1f"))
        cells += [cell(over("throughput_tokens_per_s"), ".2f", "x"), cell(over("tail_time_s"), ".2f", "x")]
    for name in ("total_time_s", "tail_time_s"):
        cells.append(cell([row["sim"][name] / row["paced"][name] - 1 for row in rows], "+.1%"))
    return f"| {' | '.join(cells)} |"


def cell(values: Sequence[float], form: str, unit: str = "") -> str:
    """Return a median, and between which values it lies."""
    median, least, most = spread(values)
    text = f"{median:{form}}{unit}"
    return text if len(values) == 1 else f"{text} [{least:{form}}, {most:{form}}]"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  python benchmarks/paced.py --only qwen2-vl-72b --seeds 1 --json rows.json",
    )
    names = list(CASES)
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these workloads only")
    parser.add_argument("--policy", nargs="+", help="these policies only; ratios are to the first")
    parser.add_argument("--engine", choices=list(SCHEDULERS), default="paced", help="whose scheduler it is")
    parser.add_argument("--data", type=Path, default=DATA, help="recorded lengths and text")
    add_options(parser, 1, "iterations per workload")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    """Run the benchmark."""
    arguments = parse(argv)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    table: list[dict[str, Any]] = []
    print(HEADER)
    for name in arguments.only:
        load = CASES[name](arguments.data)
        policies = arguments.policy or POLICY_NAMES
        if load.text is not None and not arguments.policy and arguments.engine == "paced":
            policies = (*POLICY_NAMES[:-1], "seer", POLICY_NAMES[-1])
        seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
        first: list[dict[str, Any]] = []
        for policy in policies:
            rows = [measure(load, policy, seed, arguments.set, arguments.engine) for seed in seeds]
            first = first or rows
            print(row_text(rows, first), flush=True)
            table += rows
    most = resource.getrusage(resource.RUSAGE_SELF)
    print(f"{most.ru_utime + most.ru_stime:.0f} s of CPU, {most.ru_maxrss / 1024:.0f} MiB at most")
    report(shlex.join(["python", "benchmarks/paced.py", *argv]), table, arguments.json)


if __name__ == "__main__":
    main(sys.argv[1:])
