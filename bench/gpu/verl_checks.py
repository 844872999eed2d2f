"""verl's own servers around vLLM and SGLang, under Seer's scheduler: their tests, on this device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

from bench.gpu.check import ROOT, GpuMachine, Missing

__all__ = ["kept", "kept_sglang"]

TESTS = ROOT / "training" / "verl" / "tests"
ON_GPU = "SEER_VERL_ON_GPU"
HAS_VERL = "from importlib.util import find_spec; raise SystemExit(find_spec('verl') is None)"


def kept(machine: GpuMachine) -> list[dict[str, Any]]:
    """Roll out divided and whole on vLLM: asleep meanwhile, by other weights, an image and an adapter.

    Raises:
        Missing: there is no verl, here or in ``.venv-verl``.
        AssertionError: a response differs, or something fails.
    """
    return _tested(machine, sys.executable, "vllm")


def kept_sglang(machine: GpuMachine) -> list[dict[str, Any]]:
    """Roll out divided and whole on SGLang: without KV meanwhile, by other weights, and a mixture's experts.

    Raises:
        Missing: there is no SGLang, or no verl, beside it or in ``.venv-verl``.
        AssertionError: a response differs, or something fails.
    """
    from seer_sglang.plugin import interpreter

    python = interpreter()
    if python is None:
        raise Missing("SGLang is not installed")
    return _tested(machine, python, "sglang")


def _tested(machine: GpuMachine, python: str, engine: str) -> list[dict[str, Any]]:
    environment = {**os.environ, ON_GPU: "1" if machine.device == "cuda" else ""}
    if subprocess.run([python, "-c", HAS_VERL], check=False).returncode:
        if not (ROOT / ".venv-verl").exists():
            raise Missing("verl is not installed")
        # Its packages are put behind those of the engine's environment.
        environment["PYTHONPATH"] = str(TESTS / f"beside_{engine}")
    command = [python, "-m", "pytest", "-q", "-rA", "--durations=0", f"tests/test_kept_{engine}.py"]
    done = subprocess.run(
        command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found = re.findall(r"([\d.]+)s call +\S+::(\w+)", done.stdout)
    return [{"test": name.removeprefix("test_"), "seconds": float(seconds)} for seconds, name in found]
