"""How long do the clients of slime, SkyRL and TRL take over real servers, by their own routing and with Seer?

The bundled model on two CPU servers, whose responses follow from seeds; a framework's own client sends the
same prompts in turns.  Each server keeps to one core, which it shares with the client, the router and Seer.
Prompt tokens are those of requests: tokens that a server computes again after a preemption are not among
them.

  slime  its rollout function over SGLang servers behind SGLang's router (cache-aware), or Seer's function
  SkyRL  its client behind vLLM's router (consistent hashing of trajectories), or at Seer's address
  TRL    its client at one vLLM server of two ranks, or at Seer's address before two servers

slime and SkyRL come by PYTHONPATH: contrib/slime/README.md and contrib/skyrl/README.md say how.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from seer_worker.tokenizer import ModelTokenizer

from bench.framework_clients import CLIENTS, OWN, SEER, WEIGHTS, ClientArm, ServerSizes, Texts, version_of
from bench.harness import Row, cell, less, markdown, prompts, spread_of, turned
from bench.remote_real import ServerUsage, cpu_s_of, spent_by, times_of

DEPENDS_ON = ("seer_core", "plugins", "backends/remote", "serving/server", "contrib/slime/seer_slime")
ROUNDS = 3
IDLE_S = 3.0
"""Before each rollout, so that Seer has reports without the one before, which is another client's to it."""
NAMES = {"slime": "slime", "skyrl": "SkyRL", "trl": "TRL"}
KV_TOKENS = {"short": 2048, "ample": 16384}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the part's own options."""
    clients = list(CLIENTS)
    parser.add_argument("--clients", nargs="+", choices=clients, default=clients, help="(default all)")
    parser.add_argument(
        "--kv", nargs="+", choices=list(KV_TOKENS), default=list(KV_TOKENS), help="(default all)"
    )
    parser.add_argument("--servers", type=int, default=2, metavar="N", help="(default 2)")
    parser.add_argument("--groups", type=int, default=6, help="of eight responses (default 6)")
    parser.add_argument("--most", type=int, default=600, help="tokens of a response (default 600)")
    parser.add_argument("--chunk", default="auto", help="tokens of a chunk (default auto)")


def run(options: argparse.Namespace) -> list[Row]:
    """Have each client roll the same prompts out in both ways, in turns, for each amount of KV."""
    tokenizer = ModelTokenizer(WEIGHTS)
    rows = [
        each | {"ids": tokenizer.encode(each["prompt"]), "max_tokens": options.most}
        for each in prompts(options.groups)
    ]
    versions = {name: version_of(name) for name in options.clients}
    return [
        {"client": name, "version": version, "kv": kv} | row
        for name, version in versions.items()
        for kv in options.kv
        for row in _in_turns(name, kv, rows, options)
    ]


def _as_config(chunk: str) -> str:
    return json.dumps(chunk if chunk == "auto" else int(chunk))


def _in_turns(name: str, kv: str, rows: Sequence[Row], options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each way of a client; a rollout before the first warms both up."""
    found: dict[str, list[Row]] = {OWN: [], SEER: []}
    texts: dict[str, list[Texts]] = {OWN: [], SEER: []}
    with tempfile.TemporaryDirectory() as place:
        asked = ServerSizes(Path(place), options.servers, KV_TOKENS[kv], _as_config(options.chunk))
        with CLIENTS[name](asked) as arms:
            for number, arm in turned([OWN, SEER], options.rounds, warm_up=1):
                time.sleep(IDLE_S)
                row, its = _measured(arms[arm], rows)
                print(f"{name}, KV {kv}, {number}, {arm}: {row}", file=sys.stderr, flush=True)
                if number >= 0:
                    found[arm].append(row)
                    texts[arm].append(its)
    [wanted, *_] = texts[OWN]
    for arm, mine in found.items():
        figures = {figure: spread_of(each[figure] for each in mine) for figure in mine[0]}
        yield {"arm": arm, "same": all(each == wanted for each in texts[arm])} | figures


def _measured(arm: ClientArm, rows: Sequence[Row]) -> tuple[Row, Texts]:
    """Return what a rollout took and its responses; the tail is left out if only its end is seen."""
    usage = ServerUsage(arm.servers, arm.counts)
    beside = [psutil.Process(), *map(psutil.Process, arm.beside)]
    began_cpu_s, began_s = sum(map(cpu_s_of, beside)), time.monotonic()
    ends_s: list[float] = []
    texts = arm.roll_out(rows, lambda: ends_s.append(time.monotonic() - began_s))
    total_s = time.monotonic() - began_s
    row = {"total_s": total_s, "tokens": float(sum(map(len, texts.values())))}
    if ends_s:
        row["tail_s"] = times_of(ends_s)["tail_s"]
    row["beside_cpu_s"] = sum(map(cpu_s_of, beside)) - began_cpu_s
    return row | spent_by(usage), texts


def table(rows: Sequence[Row]) -> str:
    """Return a line for each way of each client."""
    columns = ["client", "KV", "", "same tokens", "total, s", "tail, s", "prompt tokens computed"]
    columns += ["preemptions", "CPU of the servers, s", "of client, router and Seer, s"]
    lines = []
    for row in rows:
        first = row["arm"] == OWN
        line = [
            f"{NAMES[row['client']]} {row['version']}" if first else "",
            row["kv"] if first else "",
            row["arm"],
        ]
        line += ["yes" if row["same"] else "NO", cell(row["total_s"])]
        line.append(cell(row["tail_s"]) if "tail_s" in row else "")
        line += [cell(row[name], ",.0f") for name in ("computed", "preemptions")]
        lines.append([*line, cell(row["server_cpu_s"]), cell(row["beside_cpu_s"], ".2f")])
    return markdown(columns, lines, left=3)


def answer(rows: Sequence[Row]) -> str:
    """Return how much time Seer saves each client, by the medians."""
    medians = {(row["client"], row["kv"], row["arm"]): row["total_s"]["median"] for row in rows}
    saved: dict[str, list[str]] = {}
    for client, kv, arm in medians:
        if arm == SEER:
            share = less(1 - medians[client, kv, SEER] / medians[client, kv, OWN])
            saved.setdefault(client, []).append(f"{share} time where KV is {kv}")
    return " ".join(
        f"On two real servers {NAMES[client]}'s client takes, with Seer in place of its own routing,"
        f" {' and '.join(said)}."
        for client, said in saved.items()
    )
