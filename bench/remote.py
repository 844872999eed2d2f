"""How much of its gain does Seer keep in front of servers that run already, and what do their faults cost?

Paced: vLLM's scheduler on emulated instances, as Seer's own workers and behind the HTTP dialect of
`seer-remote`, on a virtual clock and without sockets; a request takes 5 ms on its way. Recorded lengths of
DeepCoder 14B, 40 times shorter, under Seer's policy without drafts; a seed chooses the iteration. The servers
alone have veRL's policy. Seer's package ends chunks where KV runs short; without it vLLM preempts them.
verl: the same servers, to which verl sends each response whole, to the one with the fewest; beside it Seer,
and the shadow's prediction from what verl's client sees.
Real: two stock servers of the bundled model on CPUs, keyed, beside a client that sends whole responses to
each in turn; the same prompts and seeds, in turns.
Faults: three server processes without a model, or two of vLLM with the bundled model, each behind a proxy
with TLS that spoils chunks, while rollouts go on; every response is compared with that of a run without
faults. Scale: the driver's CPU, memory, threads
and descriptors with ten thousand requests in flight, against stand-ins that hold them until all are there.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness import DATA, Row, cell, markdown
from bench.remote_verl import LOADS as VERL_LOADS
from bench.remote_verl import measure_verl, sentence, verl_table

DEPENDS_ON = ("seer_core", "plugins", "backends/remote", "backends/paced", "tests/soak/remote_campaign.py")
ROUNDS = 1
SHORTER = 40
ALONE, OWN = "servers alone", "own workers, KV shared"
PACKAGE, APART = "servers with Seer's package, KV shared", "servers with Seer's package, KV apart"
SERVERS = {"stand-in": "three servers without a model", "vllm": "two vLLM servers on a CPU"}
FAULTS = {"stand-in": 200, "vllm": 40}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parts = ["paced", "verl", "real", "faults", "scale"]
    parser.add_argument("--part", nargs="+", choices=parts, default=parts, help="(default all)")
    parser.add_argument("--shorter", type=int, default=SHORTER, help=f"of the lengths (default {SHORTER})")
    parser.add_argument("--instances", type=int, nargs="+", default=[2, 4], help="paced (default 2 4)")
    parser.add_argument("--arms", type=int, nargs="+", default=[], help="paced, by number (default all)")
    loads = list(VERL_LOADS)
    parser.add_argument("--loads", nargs="+", choices=loads, default=loads, help="verl (default all)")
    parser.add_argument("--data", type=Path, default=DATA.parent, help="folder of the recorded lengths")
    known = ", ".join(f"{name}={count}" for name, count in FAULTS.items())
    parser.add_argument(
        "--faults", action="append", default=[], metavar="SERVERS=N", help=f"(default {known})"
    )
    parser.add_argument("--kinds", nargs="+", default=[], metavar="FAULT", help="only these (default all)")
    parser.add_argument("--minutes", type=float, default=30.0, help="of faults at most, each (default 30)")
    parser.add_argument("--seed", type=int, default=1, help="of the faults (default 1)")
    parser.add_argument("--groups", type=int, default=6, help="real: of eight responses (default 6)")
    parser.add_argument("--most", type=int, default=600, help="real: tokens of a response (default 600)")
    parser.add_argument("--chunk", type=int, default=64, help="real: tokens of a chunk (default 64)")
    parser.add_argument("--requests", type=int, default=10_000, help="in flight (default 10000)")


def run(options: argparse.Namespace) -> list[Row]:
    """Measure the parts that are asked for."""
    rows: list[Row] = []
    if "paced" in options.part:
        for instances in options.instances:
            for seed in range(options.rounds):
                rows += _paced(options, instances, seed)
    if "verl" in options.part:
        rows += measure_verl(options)
    if "real" in options.part:
        from bench.remote_real import measure_real

        rows += measure_real(options.groups, options.most, options.chunk, options.rounds)
    if "faults" in options.part:
        wanted = {name: int(count) for name, _, count in (each.partition("=") for each in options.faults)}
        for engine, count in (wanted or FAULTS).items():
            rows.append({"part": "faults", **_faults(engine, count, options)})
    if "scale" in options.part:
        from bench.remote_scale import measure_scale

        rows.append({"part": "scale", **measure_scale(options.requests)})
    return rows


def _paced(options: argparse.Namespace, instances: int, seed: int) -> list[Row]:
    from seer_lab import simulate as laboratory
    from seer_lab.policies import POLICIES

    from bench.paced import figures, recorded
    from bench.remote_paced import ARMS, behind_http

    shorter = options.shorter
    load = recorded(options.data, "deepcoder-14b", instances, shorter)
    make, rows = laboratory._fleet, []
    for number, (name, arm) in enumerate(ARMS.items()):
        if options.arms and number not in options.arms:
            continue

        def fleet(config, groups, text, arm=arm):  # type: ignore[no-untyped-def]
            own = make(config, groups, text)
            return behind_http(own, arm) if arm.served else own

        laboratory._fleet = fleet
        try:
            overrides = [*options.set] if arm.policy == "context" else []
            overrides += [] if arm.shares else ["seer.kv_pool=none"]
            if arm.whole:
                overrides.append("plugin.divided_rollout.reserved_share=1")
            found = laboratory.simulate(load, POLICIES[arm.policy], seed, tuple(overrides), (), "paced")
        finally:
            laboratory._fleet = make
        row = {"part": "paced", "instances": instances, "seed": seed, "arm": name, "shorter": shorter}
        rows.append(row | figures(found))
        print(f"{instances}, {seed}, {name}: {rows[-1]['total_time_s']:.2f} s", file=sys.stderr, flush=True)
    return rows


def _faults(engine: Any, faults: int, options: argparse.Namespace) -> Row:
    from tests.soak.remote_campaign import ANSWERS, PROCESSES, RemoteCampaign

    kinds = options.kinds or (*ANSWERS, *PROCESSES)
    with tempfile.TemporaryDirectory() as folder:
        campaign = RemoteCampaign(Path(folder), faults, options.seed, options.minutes, engine, kinds)
        asyncio.run(campaign.run())
    return campaign.row()


def table(rows: Sequence[Row]) -> str:
    """Return tables of the paced arms and of real servers, and a sentence for each other part."""
    paced = [row for row in rows if row["part"] == "paced"]
    real = [row for row in rows if row["part"] == "real"]
    verl = [row for row in rows if row["part"] == "verl"]
    parts = [_paced_table(paced)] if paced else []
    parts += [verl_table(verl)] if verl else []
    parts += [_real_table(real)] if real else []
    parts += [_sentence(row) for row in rows if row["part"] in ("faults", "scale")]
    return "\n\n".join(parts)


def _grouped(rows: Sequence[Row]) -> dict[int, dict[str, list[Row]]]:
    """Return the paced rows, seed by seed, by the number of instances and the arm."""
    found: dict[int, dict[str, list[Row]]] = {}
    for row in rows:
        if row["part"] == "paced":
            found.setdefault(row["instances"], {}).setdefault(row["arm"], []).append(row)
    return found


def _gains(arms: dict[str, list[Row]], arm: str) -> list[float]:
    """Return by how much less time an arm takes than the servers alone, seed by seed."""
    alone = [row["total_time_s"] for row in arms[ALONE]]
    return [1 - row["total_time_s"] / its for row, its in zip(arms[arm], alone, strict=True)]


def _paced_table(paced: Sequence[Row]) -> str:
    columns = ["instances", "", "total, s", "less than alone", "tail, s", "chunks", "moves"]
    columns += ["computed again", "preemptions"]
    lines = []
    for instances, arms in _grouped(paced).items():
        for arm, mine in arms.items():
            line = [str(instances), arm, cell(row["total_time_s"] for row in mine)]
            line.append(cell(_gains(arms, arm), ".1%") if ALONE in arms else "")
            line.append(cell(row["tail_time_s"] for row in mine))
            names = ("chunks", "migrations", "recomputed_tokens", "preemptions")
            lines.append(line + [cell((row[name] for row in mine), ",.0f") for name in names])
    return markdown(columns, lines, left=2)


def _real_table(real: Sequence[Row]) -> str:
    columns = ["KV", "", "same tokens", "total, s", "tail, s", "chunks", "moves", "prompt tokens computed"]
    columns += ["preemptions", "CPU of the servers, ms a token", "of the driver, ms a chunk"]
    lines = []
    for row in real:
        tokens, chunks = row["tokens"]["median"], row["chunks"]["median"]
        names = ("chunks", "moves", "computed", "preemptions")
        lines.append(
            [
                row["kv"],
                row["arm"],
                "yes" if row["same"] else "NO",
                cell(row["total_s"]),
                cell(row["tail_s"]),
                *(cell(row[name], ",.0f") for name in names),
                f"{1e3 * row['server_cpu_s']['median'] / tokens:.2f}",
                f"{1e3 * row['driver_cpu_s']['median'] / chunks:.1f}",
            ]
        )
    return markdown(columns, lines, left=2)


def _complaints(row: Row) -> str:
    found = row["complaints"]
    return f"{len(found)}, such as {found[0]}" if found else "none"


def _sentence(row: Row) -> str:
    if row["part"] == "faults":
        kinds = ", ".join(f"{count} {name}" for name, count in sorted(row["kinds"].items()))
        return (
            f"{SERVERS[row['engine']]}: {row['faults']} faults ({kinds}) in {row['rollouts']} rollouts of"
            f" {row['responses']:,} responses:"
            f" {row['lost']} lost, {row['doubled']} twice, {row['wrong']} with a wrong token,"
            f" {row['instances_lost']} losses of servers."
            f" Complaints: {_complaints(row)}."
        )
    grown = (row["rss_bytes"] - row["rss_before_bytes"]) / row["in_flight"]
    return (
        f"{row['in_flight']:,} requests in flight on one driver: {row['threads']} threads,"
        f" {row['descriptors']:,} descriptors, {grown / 1e3:.0f} kB each;"
        f" {1e3 * row['cpu_s'] / row['chunks']:.2f} ms of CPU for a chunk of {row['chunk_tokens']} tokens"
        f" after {row['prompt_tokens']}, in {row['chunks']:,} chunks."
    )


def answer(rows: Sequence[Row]) -> str:
    """Return the part of the gain that is left, what real servers took, and what came of the faults."""
    sentences = []
    for instances, arms in _grouped(rows).items():
        own, shared, apart = (median(_gains(arms, arm)) for arm in (OWN, PACKAGE, APART))
        sentences.append(
            f"In front of {instances} servers a rollout takes {shared:.1%} less time than on the servers"
            f" alone if they share KV, and {apart:.1%} less if they do not; on workers of its own Seer saves"
            f" {own:.1%}."
        )
    if verl := [row for row in rows if row["part"] == "verl"]:
        sentences.append(sentence(verl))
    real = {(row["kv"], row["arm"]): row for row in rows if row["part"] == "real"}
    for kv in dict.fromkeys(kv for kv, _ in real):
        alone, mine = (real[kv, arm] for arm in ("each in turn", "Seer"))
        sentences.append(
            f"On two real servers on a CPU, with {kv} KV, Seer took {mine['total_s']['median']:.0f} s with"
            f" {mine['preemptions']['median']:,.0f} preemptions; a client that sends to each in turn took"
            f" {alone['total_s']['median']:.0f} s with {alone['preemptions']['median']:,.0f}."
        )
    for row in rows:
        if row["part"] == "faults":
            sentences.append(
                f"During {row['faults']} faults of {SERVERS[row['engine']]}, of {row['responses']:,}"
                " responses"
                f" {row['lost']} were lost, {row['doubled']} came twice and {row['wrong']} had a wrong token;"
                f" {len(row['complaints'])} further flaws were found."
            )
        if row["part"] == "scale":
            sentences.append(
                f"One driver has {row['in_flight']:,} requests in flight with {row['threads']} threads, and"
                f" spends {1e3 * row['cpu_s'] / row['chunks']:.1f} ms of CPU on a chunk."
            )
    return " ".join(sentences)
