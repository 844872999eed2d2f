"""How many trajectories an hour does each way of keeping KV while tools work bring, under KV pressure?

The trajectories are those of a search agent (Qwen2.5-7B, not published, `--data` names their folder): 256
groups of 8 in each of two iterations, with 2.6 turns on average, as recorded and scaled.  A row's factors
multiply the tokens of turns and answers, and the seconds of tools.  Longer tasks have more turns: in `4
joined` and `16 joined` so many recorded trajectories make one, 10 and 42 turns on average.  They run on four
simulated instances whose KV holds a quarter of all contexts.  The answers of tools are prefilled under every
policy.  With ``--engine paced`` the instances are vLLM's own scheduler on emulated accelerators, with
``--engine paced-sglang`` SGLang's, and the simulator stands beside them.  ``--scale`` takes so large a part
of the groups, the first ones, and of the instances.

`sticky` is the way of verl and SkyRL: each trajectory stays on one instance, and its engine's prefix cache
keeps KV until others need the room.  `cache-ttl`, `program-pause` and `migrate-in-tools` are rivals
(contrib/rivals), after CacheTTL, ThunderAgent and Heddle.  `divided` and `context` are Seer's scheduling
without drafts: its pool has the KV of each turn while the tool works.  `room for all` is `sticky` on
instances whose KV holds all contexts, where none is lost.

KV hits are the part of the context before an answer whose KV was found when the next turn began, in the
instance or in the pool.  The longest wait is from an answer to the first step of the turn that follows.  The
first nine tenths leave out the tail: seven trajectories of the first iteration and eleven of the second have
a turn of 1,000 to 3,000 tokens, where others have 80.  The last ends long after the instances have run empty.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from seer_cli.stats import ratios
from seer_lab.paced import SCHEDULERS
from seer_lab.policies import POLICIES
from seer_lab.recorded import RecordedLengths, read_recorded
from seer_lab.simulate import SimulatedIteration, simulate
from seer_lab.workload_choice import choose_workload

from bench.harness import Row, cell, markdown, percent, spread_of

DEPENDS_ON = (
    "seer_core",
    "plugins",
    "backends/sim",
    "backends/sglang",
    "backends/vllm",
    "backends/worker",
    "backends/paced",
    "backends/kv_local",
    "lab",
)
ROUNDS = 2
FILE = "agent_turns.jsonl"
BASELINE, ROOM = "sticky", "room for all"
SIMULATOR = "sim"
RIVALS = ("cache-ttl", "program-pause", "migrate-in-tools")
OURS = ("divided", "context")
INSTANCES, PRESSURE, ROOMY = 4, 4.0, 0.5
CLUSTER = "qwen2.5-14b"

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "as recorded": {"tool_times": 1.0},
    "tools x 20": {"tool_times": 20.0},
    "turns x 4": {"turn_tokens": 4.0},
    "turns x 4, tools x 20": {"turn_tokens": 4.0, "tool_times": 20.0},
    "4 joined": {"join": 4},
    "16 joined": {"join": 16},
    "16 joined, tools x 20": {"join": 16, "tool_times": 20.0},
}
"""What is done to the recorded trajectories, by the name of a row."""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--data", type=Path, required=True, help=f"folder with {FILE}")
    parser.add_argument("--only", action="append", choices=SHAPES, help="may repeat (default: all)")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the groups and of the instances")
    parser.add_argument(
        "--engine", choices=(SIMULATOR, *SCHEDULERS), default=SIMULATOR, help="where they run"
    )


def run(options: argparse.Namespace) -> list[Row]:
    """Roll out both iterations of every workload under each policy; a row for each of both.

    Rows of another engine have the same figures of the simulator's besides, as ``simulated``.
    """
    rows: list[Row] = []
    for name in options.only or SHAPES:
        instances = max(1, round(INSTANCES * options.scale))
        read = partial(_first_groups, options.scale)
        shape: dict[str, Any] = {"on": CLUSTER, "instances": instances, "read": read, **SHAPES[name]}
        crowded = choose_workload(str(options.data / FILE), pressure=PRESSURE, **shape)
        roomy = choose_workload(str(options.data / FILE), pressure=ROOMY, **shape)
        found: dict[str, dict[str, list[SimulatedIteration]]] = {}
        for policy in (BASELINE, *RIVALS, *OURS, ROOM):
            load, named = (roomy, BASELINE) if policy == ROOM else (crowded, policy)
            for engine in dict.fromkeys((options.engine, SIMULATOR)):
                found.setdefault(engine, {})[policy] = [
                    simulate(load, POLICIES[named], seed, options.set, engine=engine)
                    for seed in range(options.rounds)
                ]
            print(f"{name}: {policy}", file=sys.stderr, flush=True)
        measured = found.pop(options.engine)
        for policy, runs in measured.items():
            row = {"workload": name, "policy": policy, **_figures(runs, measured[BASELINE])}
            for simulated in found.values():
                row["simulated"] = _figures(simulated[policy], simulated[BASELINE])
            rows.append(row)
    return rows


def _first_groups(share: float, *arguments: Any) -> RecordedLengths:
    """Return the first groups of each iteration of a file, so large a part of them."""
    recorded = read_recorded(*arguments)
    kept = [groups[: max(1, round(len(groups) * share))] for groups in recorded.iterations]
    return replace(recorded, iterations=kept)


def _figures(runs: Sequence[SimulatedIteration], base: Sequence[SimulatedIteration]) -> Row:
    """Return what is compared of a policy's runs, and their ratios to the baseline's, round by round."""
    turns = [each.turns for each in runs if each.turns is not None]
    per_hour = [each.trajectories_per_hour for each in runs]
    return {
        "trajectories_per_hour": spread_of(per_hour),
        "ratio_to_sticky": spread_of(ratios(per_hour, [each.trajectories_per_hour for each in base])),
        "ratio_without_tail": spread_of(ratios(map(_early_s, base), map(_early_s, runs))),
        "turn_kv_hits": spread_of(each.kv_hits for each in turns),
        "turn_wait_s": spread_of(each.longest_wait_s for each in turns),
        "total_time_s": spread_of(each.summary.total_time_s for each in runs),
        "tail_time_s": spread_of(each.summary.tail_time_s for each in runs),
        "idle_share": spread_of(each.idle_share for each in runs),
        "summaries": [msgspec.to_builtins(each.summary) for each in runs],
    }


def _early_s(run: SimulatedIteration) -> float:
    """Return how long the first nine tenths of the trajectories took."""
    return run.summary.total_time_s - run.summary.tail_time_s


def table(rows: Sequence[Row]) -> str:
    """Return one line for each workload and policy, with the simulator's beside another engine's."""
    columns = ["trajectories", "policy", "per hour", "times sticky", "first nine tenths", "KV hits at turns"]
    columns += ["recomputed tokens", "longest wait", "idle"]
    if any("simulated" in row for row in rows):
        columns += ["simulated: times sticky", "KV hits", "total differs"]
    lines = []
    for row in rows:
        line = [
            row["workload"],
            row["policy"],
            cell(row["trajectories_per_hour"], ",.0f"),
            cell(row["ratio_to_sticky"], ".2f", "x"),
            cell(row["ratio_without_tail"], ".2f", "x"),
            cell(row["turn_kv_hits"], ".1%"),
            cell([each["recomputed_tokens"] for each in row["summaries"]], ",.0f"),
            cell(row["turn_wait_s"], ",.1f", " s"),
            cell(row["idle_share"], ".1%"),
        ]
        if "simulated" in row:
            simulated = row["simulated"]
            line += [
                cell(simulated["ratio_to_sticky"], ".2f", "x"),
                cell(simulated["turn_kv_hits"], ".1%"),
                cell(_apart(row), "+.1%"),
            ]
        lines.append(line)
    return markdown(columns, lines, left=2)


def _apart(row: Row) -> list[float]:
    """Return by how much the simulator's total times differ, round by round."""
    pairs = zip(row["simulated"]["summaries"], row["summaries"], strict=True)
    return [simulated["total_time_s"] / measured["total_time_s"] - 1 for simulated, measured in pairs]


def answer(rows: Sequence[Row]) -> str:
    """Return the gain of the best of Seer's policies, of the best rival, and of room for all KV."""
    found: dict[str, list[float]] = {}
    for name in dict.fromkeys(row["workload"] for row in rows):
        ratio = {row["policy"]: row["ratio_to_sticky"]["median"] for row in rows if row["workload"] == name}
        for who, policies in (("Seer", OURS), ("rival", RIVALS), (ROOM, (ROOM,))):
            found.setdefault(who, []).append(max(map(ratio.__getitem__, policies)) - 1)
    more = {who: f"{percent(min(each))} to {percent(max(each))}" for who, each in found.items()}
    text = (
        f"With tools and short KV, Seer finishes {more['Seer']} more trajectories per hour than sticky"
        f" sessions do. The best published policy finishes {more['rival']} more, and instances with {ROOM} KV"
        f" {more[ROOM]}."
    )
    if apart := [abs(each) for row in rows if "simulated" in row for each in _apart(row)]:
        text += (
            " This is an engine's own scheduler on emulated accelerators; the simulator's total times are at"
            f" most {100 * max(apart):.1f} % off."
        )
    return text
