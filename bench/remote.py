"""How much of its gain does Seer keep in front of servers that run already, and what do their faults cost?

Paced: vLLM's scheduler on two emulated instances, as Seer's own workers and behind the HTTP dialect of
`seer-remote`, on a virtual clock and without sockets; a request takes 5 ms on its way. Recorded lengths of
DeepCoder 14B, 40 times shorter, under Seer's policy without drafts. The servers alone have veRL's policy.
Faults: three server processes without a model, or two of vLLM with the bundled model, each behind a proxy
with TLS that spoils chunks, while rollouts go on; every response is compared with that of a run without
faults. Scale: the driver's CPU, memory, threads
and descriptors with ten thousand requests in flight, against stand-ins that hold them until all are there.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import DATA, Row, markdown

DEPENDS_ON = ("seer_core", "plugins", "backends/remote", "backends/paced", "tests/soak/remote_campaign.py")
ROUNDS = 1
SHORTER = 40
SERVERS = {"stand-in": "three servers without a model", "vllm": "two of vLLM on a CPU"}
FAULTS = {"stand-in": 200, "vllm": 40}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parts = ["paced", "faults", "scale"]
    parser.add_argument("--part", nargs="+", choices=parts, default=parts, help="(default all)")
    parser.add_argument("--shorter", type=int, default=SHORTER, help=f"of the lengths (default {SHORTER})")
    parser.add_argument("--data", type=Path, default=DATA.parent, help="folder of the recorded lengths")
    known = ", ".join(f"{name}={count}" for name, count in FAULTS.items())
    parser.add_argument(
        "--faults", action="append", default=[], metavar="SERVERS=N", help=f"(default {known})"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="of faults at most, each (default 30)")
    parser.add_argument("--seed", type=int, default=1, help="of the faults (default 1)")
    parser.add_argument("--requests", type=int, default=10_000, help="in flight (default 10000)")


def run(options: argparse.Namespace) -> list[Row]:
    """Measure the parts that are asked for."""
    rows: list[Row] = []
    if "paced" in options.part:
        rows += _paced(options.data, options.shorter)
    if "faults" in options.part:
        wanted = {name: int(count) for name, _, count in (each.partition("=") for each in options.faults)}
        for engine, count in (wanted or FAULTS).items():
            rows.append({"part": "faults", **_faults(engine, count, options.minutes, options.seed)})
    if "scale" in options.part:
        from bench.remote_scale import measure_scale

        rows.append({"part": "scale", **measure_scale(options.requests)})
    return rows


def _paced(data: Path, shorter: int) -> list[Row]:
    from seer_lab import simulate as laboratory
    from seer_lab.policies import POLICIES

    from bench.paced import figures, recorded
    from bench.remote_paced import ARMS, behind_http

    load = recorded(data, "deepcoder-14b", 2, shorter)
    make, rows = laboratory._fleet, []
    for name, arm in ARMS.items():

        def fleet(config, groups, text, arm=arm):  # type: ignore[no-untyped-def]
            own = make(config, groups, text)
            return own if arm.shares is None else behind_http(own, arm)

        laboratory._fleet = fleet
        try:
            overrides = [] if arm.pool else ["seer.kv_pool=none"]
            if arm.whole:
                overrides.append("plugin.divided_rollout.reserved_share=1")
            found = laboratory.simulate(load, POLICIES[arm.policy], 0, tuple(overrides), (), "paced")
        finally:
            laboratory._fleet = make
        rows.append({"part": "paced", "arm": name, "shorter": shorter, **figures(found)})
    return rows


def _faults(engine: Any, faults: int, minutes: float, seed: int) -> Row:
    from tests.soak.remote_campaign import RemoteCampaign

    with tempfile.TemporaryDirectory() as folder:
        campaign = RemoteCampaign(Path(folder), faults, seed, minutes, engine)
        asyncio.run(campaign.run())
    return campaign.row()


def table(rows: Sequence[Row]) -> str:
    """Return a table of the paced arms, and a sentence for each other part."""
    paced = [row for row in rows if row["part"] == "paced"]
    parts = []
    if paced:
        alone = paced[0]["total_time_s"]
        columns = [
            "",
            "total, s",
            "less than alone",
            "tail, s",
            "chunks",
            "moves",
            "computed again",
            "preemptions",
        ]
        lines = [
            [
                row["arm"],
                f"{row['total_time_s']:.1f}",
                f"{1 - row['total_time_s'] / alone:.0%}",
                f"{row['tail_time_s']:.1f}",
                f"{row['chunks']:,}",
                f"{row['migrations']:,}",
                f"{row['recomputed_tokens']:,}",
                f"{row['preemptions']:,}",
            ]
            for row in paced
        ]
        parts.append(markdown(columns, lines))
    parts += [_sentence(row) for row in rows if row["part"] != "paced"]
    return "\n\n".join(parts)


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
    """Return the part of the gain that is left, and what came of the faults."""
    total = {row["arm"]: row["total_time_s"] for row in rows if row["part"] == "paced"}
    found = []
    if total:
        alone, own = total["servers alone"], total["own workers"]
        for arm, words in (
            ("servers, KV shared", "where servers share KV"),
            ("servers, KV shared, whole chunks reserved", "there with whole chunks reserved"),
            ("servers, KV apart", "where they do not"),
        ):
            part = (alone - total[arm]) / (alone - own)
            found.append(f"{part:.0%} of the gain of own workers is left {words}")
    sentences = [", ".join(found) + "."] if found else []
    for row in rows:
        if row["part"] == "faults":
            sentences.append(
                f"{row['faults']} faults of {SERVERS[row['engine']]}, {row['responses']:,} responses:"
                f" {row['lost']} lost, {row['doubled']} twice, {row['wrong']} with a wrong token;"
                f" complaints: {len(row['complaints'])}."
            )
        if row["part"] == "scale":
            sentences.append(
                f"One driver has {row['in_flight']:,} requests in flight with {row['threads']} threads, and"
                f" spends {1e3 * row['cpu_s'] / row['chunks']:.1f} ms of CPU on a chunk."
            )
    return " ".join(sentences)
