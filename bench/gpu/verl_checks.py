"""verl's own servers around vLLM, on their GPUs, under Seer's scheduler: the test of it, on this device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

from bench.gpu.check import ROOT, GpuMachine, Missing

__all__ = ["kept"]

TESTS = ROOT / "training" / "verl" / "tests"
BESIDE = TESTS / "beside_vllm"
"""Puts verl of ``.venv-verl`` behind the packages of this environment."""
ON_GPU = "SEER_VERL_ON_GPU"


def kept(machine: GpuMachine) -> list[dict[str, Any]]:
    """Roll out divided and whole, let the engines sleep, and give them other weights.

    Raises:
        Missing: there is no verl, here or in ``.venv-verl``.
        AssertionError: a response differs, or something fails.
    """
    environment = {**os.environ, ON_GPU: "1" if machine.device == "cuda" else ""}
    if find_spec("verl") is None:
        if not (ROOT / ".venv-verl").exists():
            raise Missing("verl is not installed")
        environment["PYTHONPATH"] = str(BESIDE)
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "--durations=0", "tests/test_kept_vllm.py"]
    done = subprocess.run(
        command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found = re.findall(r"([\d.]+)s call +\S+::(\w+)", done.stdout)
    return [{"test": name.removeprefix("test_"), "seconds": float(seconds)} for seconds, name in found]
