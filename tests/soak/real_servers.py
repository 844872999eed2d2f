"""Real servers of vLLM and SGLang that a campaign strikes, with two checkpoints under one name."""

from __future__ import annotations

import importlib
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from tests.soak.owner_calls import OwnerCalls, SglangCalls, VllmCalls

__all__ = ["SglangProcess", "VllmProcess", "two_checkpoints"]

ROOT = Path(__file__).parents[2]
FOLDER = str(ROOT / "backends" / "remote" / "tests")
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)
server_processes: Any = importlib.import_module("server_processes")

WEIGHTS = ROOT / "examples" / "tiny_reasoner" / "weights"


def two_checkpoints(folder: Path) -> tuple[Path, Path]:
    """Return the bundled model, and one that differs in its weights only."""
    other = folder / "other"
    shutil.copytree(WEIGHTS, other)
    tensors = load_file(other / "model.safetensors")
    save_file(
        {name: each * 1.25 for name, each in tensors.items()},
        other / "model.safetensors",
        metadata={"format": "pt"},
    )
    return WEIGHTS, other


class RealProcess:
    """A server; ``start`` again after a kill."""

    calls: OwnerCalls

    def __init__(self, folder: Path, checkpoints: tuple[Path, Path]) -> None:
        folder.mkdir()
        self._checkpoints, self._served = checkpoints, folder / "tiny"
        self._server = self._make(folder)
        self.url: str = self._server.url

    def _make(self, folder: Path) -> Any:
        raise NotImplementedError

    def start(self, weights: int = 0) -> None:
        """Start it with the first checkpoint, or with the other one."""
        self._served.unlink(missing_ok=True)
        self._served.symlink_to(self.checkpoint(weights))
        self._server.start()

    def checkpoint(self, weights: int) -> str:
        """Return the directory of a checkpoint."""
        return str(self._checkpoints[bool(weights)])

    def send(self, number: signal.Signals) -> None:
        """Send it a signal; after a kill it is gone."""
        if number == signal.SIGKILL:
            self._server.kill()
        else:
            self._server.send(number)

    def close(self) -> None:
        """End it."""
        self._server.close()


class VllmProcess(RealProcess):
    """One of vLLM that samples by key and lets its owner do anything."""

    calls = VllmCalls()

    def _make(self, folder: Path) -> Any:
        flags = ("--enable-scale-out", "--enable-prompt-tokens-details", "--max-num-batched-tokens=256")
        variables = {"SEER_KEYED_SAMPLING": "1", "VLLM_PLUGINS": "seer", "VLLM_SERVER_DEV_MODE": "1"}
        return server_processes.vllm_server(folder, self._served, folder / "log", *flags, **variables)


class SglangProcess(RealProcess):
    """One of SGLang, whose tokens follow from seeds."""

    calls = SglangCalls()

    def _make(self, folder: Path) -> Any:
        return server_processes.sglang_server(self._served, folder / "log")
