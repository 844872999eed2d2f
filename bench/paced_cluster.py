"""Does a cluster change a rollout's table: paced instances over raylets beside the same as child processes?

`seer run` rolls out drawn lengths on vLLM's scheduler, which emulates an accelerator in real time: once with
instances that are child processes, once with instances that Ray places on four nodes, which are raylets on
this machine.  Both have the same tokens.  What differs is the way: a socket's pair there, TCP here.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.frame import Row, cell, markdown, spread_of, turned

ROOMS = ("seer_core", "backends/ray", "backends/worker", "backends/paced", "plugins")
ROUNDS = 3
NODES = 4
STORE_BYTES = 80 << 20
LIMIT_S = 1800.0
ARMS = {"local": "child processes", "ray": f"{NODES} nodes"}
FIGURES = ("throughput_tokens_per_s", "total_time_s", "tail_time_s", "migrations", "preemptions")
CONFIG = """
[seer]
plugins = ["divided_rollout", "context_sched"]
engine = "paced"
[engine.paced]
clock = "real"
instances = {instances}
kv_capacity_tokens = 16384
max_running = 64
max_model_tokens = 4096
vocab_size = 1000
[engine.paced.lengths]
mean_tokens = 600.0
cap_tokens = 3000
[launcher.ray]
cpus = 0.1
"""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--instances", type=int, default=8, help="(default 8)")
    parser.add_argument("--groups", type=int, default=48, help="of 8 responses each (default 48)")


def run(options: argparse.Namespace) -> list[Row]:
    """Roll out in every round both ways; return what their summaries have.

    Raises:
        RuntimeError: a command failed, or tokens differ.
    """
    found: dict[str, list[Row]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as name, _cluster() as address:
        folder = Path(name)
        (folder / "seer.toml").write_text(CONFIG.format(instances=options.instances))
        lines = (
            {"group_id": f"g{number}", "prompt_token_ids": list(range(5, 37)), "n": 8, "max_tokens": 3000}
            for number in range(options.groups)
        )
        (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        tokens = None
        for number, arm in turned(tuple(ARMS), options.rounds):
            out = folder / f"{arm}-{number}"
            more = ["--set", f"seer.launcher={arm}", "--set", f"launcher.ray.address={address}"]
            _roll_out(folder, out, more)
            own = _tokens(out)
            tokens = tokens or own
            if own != tokens:
                raise RuntimeError(f"round {number + 1}, {ARMS[arm]}: other tokens")
            found[arm].append(json.loads((out / "summary.json").read_text()))
            print(f"round {number + 1}, {ARMS[arm]}: {found[arm][-1]['total_time_s']:.1f} s", file=sys.stderr)
    return [
        {
            "arm": arm,
            "instances": options.instances,
            "responses": 8 * options.groups,
            **{name: spread_of(row[name] for row in rows) for name in FIGURES},
        }
        for arm, rows in found.items()
    ]


def _roll_out(folder: Path, out: Path, more: Sequence[str]) -> None:
    command = [sys.executable, "-c", "from seer_main import main; main()", "run", str(folder / "seer.toml")]
    command += ["--prompts", str(folder / "prompts.jsonl"), "--out", str(out), "--log-level", "error", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"seer run ended with {done.returncode}: {done.stderr[-2000:]}")


def _tokens(out: Path) -> dict[str, list[int]]:
    lines = (out / "completions.jsonl").read_text().splitlines()
    return {each["request_id"]: each["token_ids"] for each in map(json.loads, lines)}


@contextmanager
def _cluster() -> Iterator[str]:
    """Start raylets on this machine; yield the address of their head."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as directory:
        own = {"RAY_TMPDIR": directory, "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
        os.environ.update(own, RAY_AUTH_TOKEN=secrets.token_hex(32))
        from ray.cluster_utils import Cluster  # which reads them

        head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(NODES):
                cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
            yield cluster.address
        finally:
            cluster.shutdown()


def table(rows: Sequence[Row]) -> str:
    """Return one line for each figure, one column for each way."""
    names = {each: each.replace("_time_s", "_time, s").replace("_", " ") for each in FIGURES}
    lines = [[names[name], *(cell(row[name], ",.1f") for row in rows)] for name in FIGURES]
    return markdown(["", *(f"{row['instances']} instances, {ARMS[row['arm']]}" for row in rows)], lines)


def answer(rows: Sequence[Row]) -> str:
    """Return the ratio of both times."""
    here, there = (next(row for row in rows if row["arm"] == arm) for arm in ARMS)
    ratio = there["total_time_s"]["median"] / here["total_time_s"]["median"]
    return (
        f"{here['instances']} paced instances over {NODES} raylets take {ratio:.2f} of the time of child"
        f" processes for {here['responses']} responses, with the same tokens."
    )
