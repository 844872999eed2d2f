"""What does Seer save over verl's own routing on the same servers, and does a shadow predict it?

vLLM's scheduler on emulated instances behind the HTTP dialect of `seer-remote`, as stock servers that share
no KV.  verl sends each response whole, to the server with the fewest.  Beside it stand Seer, as the mean of
five runs whose requests take 3 to 7 ms on their way, and what the shadow predicts from what verl's client
sees.  Recorded lengths are not published: `--data` has their folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from msgspec import structs
from seer_host.shadow_records import WatchedRequest
from seer_lab.emulated import CompletionLog, dearer
from seer_lab.shadow import shadow
from seer_lab.workloads import CLUSTERS, Workload, crowded

from bench.harness import DATA, Row, cell, less, markdown, percent
from bench.paced import PAPER, PRESSURE, UNPUBLISHED, recorded, recorded_text
from bench.paced_servers import RemoteArm, simulated

DEPENDS_ON = ("seer_core", "plugins", "backends/remote", "backends/paced")
ROUNDS = 1
OWN, SEER = "verl's own routing", "under Seer"
ARMS = {OWN: RemoteArm("sticky"), SEER: RemoteArm("posterior")}
"""verl sends each response whole to the server with the fewest; Seer's are stock servers that share no KV."""
LATENCIES_S = (3e-3, 4e-3, 5e-3, 6e-3, 7e-3)
"""Of requests in the runs under Seer, whose mean is a step's time.

Where KV is short, which of two nearly equal events is first changes a schedule's time by some percent.
"""

LOADS: Mapping[str, Callable[[Path], Workload]] = {
    "deepcoder-14b": lambda data: recorded(data, "deepcoder-14b", 2, 40),
    "recorded-text": lambda data: _of_texts(data, 40),
    "dapo-32b": lambda data: recorded(data, "dapo-32b", 2, 4),
}
"""Responses of about 150 tokens in the mean: shorter ones would measure what a request costs, and no more."""
SENDING_S = 1e-6
"""Between two requests of verl's client: they come in an order, and no time passes."""
FIGURES = ("total_time_s", "tail_time_s", "prefilled_tokens", "recomputed_tokens", "chunks")


def _of_texts(data: Path, shorter: int) -> Workload:
    """Return the lengths of recorded texts in three steps of eight groups."""
    whole = recorded_text(data / UNPUBLISHED, "", shorter, shorter)
    [groups] = cast("Any", whole.lengths)
    steps = [groups[place : place + 8] for place in (0, 8, 16)]
    load = crowded(f"recorded text / {shorter}", steps, CLUSTERS[PAPER], 2, PRESSURE)
    return structs.replace(load, tables=dearer(load.tables, shorter))


def options(parser: argparse.ArgumentParser) -> None:
    """Add the part's own options."""
    loads = list(LOADS)
    parser.add_argument("--loads", nargs="+", choices=loads, default=loads, help="(default all)")
    parser.add_argument("--data", type=Path, default=DATA.parent, help="folder of the recorded lengths")


def run(options: argparse.Namespace) -> list[Row]:
    """Roll each workload's steps out under both, in turns; then have a shadow say what Seer would take.

    A step's costs are fitted to the steps before, so that the first one's are its own.
    """
    rows: list[Row] = []
    for name in options.loads:
        load = LOADS[name](options.data)
        found: list[dict[str, Any]] = []
        steps: list[list[WatchedRequest]] = []
        for step in range(options.rounds):
            log = CompletionLog()
            own = [simulated(load, ARMS[OWN], step, observers=[log]).summary]
            seer = [
                simulated(load, ARMS[SEER]._replace(latency_s=latency_s), step).summary
                for latency_s in LATENCIES_S
            ]
            arms: dict[str, Any] = {
                arm: {figure: fmean(getattr(each, figure) for each in summaries) for figure in FIGURES}
                for arm, summaries in ((OWN, own), (SEER, seer))
            }
            arms[SEER]["total_times_s"] = [each.total_time_s for each in seer]
            found.append(arms)
            steps.append(_watched(log, step, [each.id for each in load.groups(step)]))
            print(name, step, *(f"{its['total_time_s']:.2f} s" for its in arms.values()), file=sys.stderr)
        engine = load.tables["engine"]["sim"]
        said = shadow(steps, max_running=engine["max_running"], kv_tokens=engine["kv_capacity_tokens"])
        for arms, its in zip(found, said, strict=True):
            predicted = {
                "seer_s": its.seer_s,
                "seer_range_s": its.seer_range_s,
                "replayed_s": its.replayed_s,
                "own_costs": its.own_costs,
            }
            rows.append({"workload": load.name, "step": its.step, **arms, "shadow": predicted})
    return rows


def _watched(log: CompletionLog, step: int, groups: Sequence[str]) -> list[WatchedRequest]:
    """Return what verl's client sees: all requests are sent at the beginning, group by group."""
    places = {group: place for place, group in enumerate(groups)}
    sent = sorted(log.completions, key=lambda each: (places[each.group_id], each.index))
    return [
        WatchedRequest(
            step,
            each.group_id,
            each.instances[0],
            each.chunks[0].cached_tokens + each.chunks[0].prefilled_tokens,
            len(each.token_ids),
            number * SENDING_S,
            each.finished_s,
        )
        for number, each in enumerate(sent)
    ]


def _by_workload(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["workload"], []).append(row)
    return found


def _off(row: Row) -> float:
    """Return how far the shadow is off: predicted over measured, less 1."""
    return float(row["shadow"]["seer_s"] / row[SEER]["total_time_s"] - 1)


def _saved(row: Row) -> float:
    return float(1 - row[SEER]["total_time_s"] / row[OWN]["total_time_s"])


def table(rows: Sequence[Row]) -> str:
    """Return a table of both ways, and of what the shadow says."""
    columns = ["workload", "", "total, s", "tail, s", "prefilled tokens", "requests", "time"]
    columns += ["the shadow says, s", "off by"]
    lines = []
    for workload, mine in _by_workload(rows).items():
        for arm in ARMS:
            its = [row[arm] for row in mine]
            line = [workload if arm == OWN else "", arm]
            line += [cell(each[name] for each in its) for name in ("total_time_s", "tail_time_s")]
            line += [cell((each[name] for each in its), ",.0f") for name in ("prefilled_tokens", "chunks")]
            if arm == OWN:
                line += ["", cell(row["shadow"]["replayed_s"] for row in mine)]
                line.append(
                    cell([row["shadow"]["replayed_s"] / row[OWN]["total_time_s"] - 1 for row in mine], "+.1%")
                )
            else:
                line += [cell([-_saved(row) for row in mine], "+.1%")]
                line += [cell(row["shadow"]["seer_s"] for row in mine), cell(map(_off, mine), "+.1%")]
            lines.append(line)
    return markdown(columns, lines, left=2)


def answer(rows: Sequence[Row]) -> str:
    """Return how far the shadow is off where its costs are those of steps before."""
    found = [_off(row) for row in rows if not row["shadow"]["own_costs"]]
    saved = [_saved(row) for row in rows]
    return (
        f"Over stock servers that share no KV, Seer takes between {less(max(saved))} and {less(min(saved))}"
        " time than verl's own routing. A shadow predicts that from verl's lengths and times alone, and is at"
        f" most {percent(max(map(abs, found)))} off."
    )
