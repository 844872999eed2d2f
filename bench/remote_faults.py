"""What do faults of servers that run already cost a rollout's responses?

Three server processes without a model (``stand-in``), or two of vLLM or SGLang with the bundled model
(``vllm``, ``sglang``), each behind a proxy with TLS that spoils chunks, while rollouts go on, first in chunks
and then with whole responses.  Every response is compared with that of a run without faults.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cluster_faults import add_options, wanted
from bench.harness import Row

DEPENDS_ON = ("seer_core", "plugins", "backends/remote", "tests/soak/remote_campaign.py")
ROUNDS = 1
SERVERS = {
    "stand-in": "three servers without a model",
    "vllm": "two vLLM servers on a CPU",
    "sglang": "two SGLang servers on a CPU",
}
FAULTS = {"stand-in": 200, "vllm": 40, "sglang": 40}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the part's own options."""
    add_options(parser, FAULTS, minutes=30.0, seed=1)
    parser.add_argument("--kinds", nargs="+", default=[], metavar="FAULT", help="only these (default all)")


async def run(options: argparse.Namespace) -> list[Row]:
    """Carry a campaign out on the servers of each kind."""
    from tests.soak.remote_campaign import ANSWERS, PROCESSES, RemoteCampaign

    rows: list[Row] = []
    kinds = options.kinds or (*ANSWERS, *PROCESSES)
    for name, faults in wanted(options, FAULTS).items():
        engine: Any = name
        with tempfile.TemporaryDirectory() as folder:
            campaign = RemoteCampaign(Path(folder), faults, options.seed, options.minutes, engine, kinds)
            await campaign.run()
        rows.append(campaign.row())
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return a sentence for the servers of each kind."""
    return "\n\n".join(map(_sentence, rows))


def _sentence(row: Row) -> str:
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(row["kinds"].items()))
    found = row["complaints"]
    complaints = f"{len(found)}, such as {found[0]}" if found else "none"
    if ways := row.get("ways"):
        kinds += "; " + ", ".join(f"{count} while responses ran {way}" for way, count in ways.items())
    return (
        f"{SERVERS[row['engine']]}: {row['faults']} faults ({kinds}) in {row['rollouts']} rollouts of"
        f" {row['responses']:,} responses:"
        f" {row['lost']} lost, {row['doubled']} twice, {row['wrong']} with a wrong token,"
        f" {row['instances_lost']} losses of servers."
        f" Complaints: {complaints}."
    )


def answer(rows: Sequence[Row]) -> str:
    """Return what came of the faults."""
    return " ".join(
        f"{row['faults']} faults of {SERVERS[row['engine']]} cost none of {row['responses']:,} responses."
        if not (row["lost"] or row["doubled"] or row["wrong"] or row["complaints"])
        else f"{row['faults']} faults of {SERVERS[row['engine']]}, {row['responses']:,} responses:"
        f" {row['lost']} lost, {row['doubled']} twice, {row['wrong']} with a wrong token;"
        f" complaints: {len(row['complaints'])}."
        for row in rows
    )
