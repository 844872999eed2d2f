"""Kill a node of a cluster in the middle of a rollout on real vLLM engines, and compare all tokens.

The bundled example rolls out twice: on child processes of this machine, then on a Ray cluster of four nodes,
which are raylets on this machine.  Three of the nodes have an instance each.  One of them is killed once the
first responses are there; its instance starts again on the fourth.  The exit status is 1 if a token differs.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

EXAMPLE = Path(__file__).parents[1] / "examples/tiny_reasoner"
PROGRAM = "from seer_main import main; main()"
INSTANCES, NODES = 3, 4
STORE_BYTES = 80 << 20
LIMIT_S = 1200.0
WORKER = "seer_worker.process"
FOR_RAY = {  # read when it is imported
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_enable_metrics_collection": "0",
}
BEGUN_S = time.monotonic()


def main() -> int:
    """Run the demo; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=12, help="how many of the example's 48 (default 12)")
    options = parser.parse_args()
    os.environ.update(FOR_RAY, RAY_AUTH_TOKEN=secrets.token_hex(32))
    directory = Path(tempfile.mkdtemp(prefix="ray-"))  # short: the paths of sockets are bounded
    os.environ["RAY_TMPDIR"] = str(directory)
    try:
        prompts = directory / "prompts.jsonl"
        lines = (EXAMPLE / "prompts.jsonl").read_text("utf-8").splitlines(keepends=True)
        prompts.write_text("".join(lines[: options.prompts]), "utf-8")
        say(f"rolling out {options.prompts} prompts on {INSTANCES} child processes")
        here = roll_out(prompts, directory / "here", [])
        there = on_cluster(prompts, directory / "there")
        return report(here, there)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def say(text: str) -> None:
    """Print what happens, and when."""
    print(f"[{time.monotonic() - BEGUN_S:4.0f} s] {text}", flush=True)


def roll_out(
    prompts: Path, out: Path, overrides: list[str], midway: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Run ``seer run``, and ``midway`` once the first responses are there; return what came of it."""
    command = [sys.executable, "-c", PROGRAM, "run", str(EXAMPLE / "demo.toml"), "--log-level", "error"]
    overrides = ["seer.kv_pool=none", f"engine.vllm.instances={INSTANCES}", *overrides]
    command += ["--prompts", str(prompts), "--out", str(out)]
    command += [word for each in overrides for word in ("--set", each)]
    errors = out.with_suffix(".log")
    begun_s = time.monotonic()
    with errors.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        while process.poll() is None:
            if midway is not None and (out / "completions.jsonl").exists() and responses(out):
                midway()
                midway = None
            if time.monotonic() > begun_s + LIMIT_S:
                raise SystemExit(f"the rollout has not ended within {LIMIT_S:g} s: {tail(errors)}")
            time.sleep(0.1)
    finally:
        process.terminate()
        process.wait()
    if process.returncode:
        raise SystemExit(f"the rollout ended with {process.returncode}: {tail(errors)}")
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    return {
        "tokens": responses(out),
        "seconds": time.monotonic() - begun_s,
        "lost": summary["instances_lost"],
        "struck": midway is None,
    }


def tail(log: Path) -> str:
    """Return the last lines of a log."""
    return log.read_text("utf-8", errors="replace")[-3000:]


def responses(out: Path) -> dict[str, list[int]]:
    """Return the tokens of the responses that have finished."""
    lines = (out / "completions.jsonl").read_bytes().splitlines(keepends=True)
    whole = (json.loads(line) for line in lines if line.endswith(b"\n"))
    return {each["request_id"]: each["token_ids"] for each in whole}


def on_cluster(prompts: Path, out: Path) -> dict[str, Any]:
    """Roll out on a cluster, of which a node is killed on the way."""
    from ray.cluster_utils import Cluster

    say(f"starting a Ray cluster of {NODES} nodes on this machine")
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False},
    )
    try:
        nodes = [cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES) for _ in range(NODES)]
        say(f"rolling out on {INSTANCES} of the nodes")
        overrides = ["seer.launcher=ray", f"launcher.ray.address={cluster.address}"]
        return roll_out(prompts, out, overrides, lambda: kill_one(nodes))
    finally:
        say("ending the cluster")
        cluster.shutdown()


def kill_one(nodes: list[Any]) -> None:
    """Kill the raylet of a node that has an instance, and wait for it: a zombie's workers would go on."""
    from ray._private import ray_constants

    for node in nodes:
        raylet = node.all_processes[ray_constants.PROCESS_TYPE_RAYLET][0].process
        commands = (" ".join(each.cmdline()) for each in psutil.Process(raylet.pid).children(recursive=True))
        if any(WORKER in command for command in commands):
            raylet.kill()
            raylet.wait()
            say(f"killed the raylet of node {node.node_id[:12]}, and with it the instance there")
            return
    raise SystemExit("no node has an instance")


def report(here: dict[str, Any], there: dict[str, Any]) -> int:
    """Print the table; return the exit status."""
    equal = there["tokens"] == here["tokens"]
    count = len(here["tokens"])
    same = sum(there["tokens"].get(name) == tokens for name, tokens in here["tokens"].items())
    print(f"\n{'':28} {'child processes':>16} {'4 nodes, 1 killed':>18}")
    for name, key in (("seconds, with the start", "seconds"), ("instances lost", "lost")):
        print(f"{name:28} {here[key]:16.0f} {there[key]:18.0f}")
    print(f"{'responses':28} {count:16} {len(there['tokens']):18}")
    written = [sum(map(len, each["tokens"].values())) for each in (here, there)]
    print(f"{'tokens':28} {written[0]:16,} {written[1]:18,}")
    print(f"{'responses with equal tokens':28} {'':16} {same:>11} of {count}")
    struck = there["struck"] and there["lost"] > 0
    print(f"\ntokens equal: {'yes' if equal else 'NO'}" + ("" if struck else "; but no instance was lost"))
    return 0 if equal and struck else 1


if __name__ == "__main__":
    sys.exit(main())
