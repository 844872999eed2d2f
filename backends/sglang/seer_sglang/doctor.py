"""Checks of the machine for this backend: an environment with SGLang, a model, memory, CPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from seer_host.installation import how_to_install
from seer_host.interpreters import versions_under

from seer_core.errors import SeerError
from seer_core.plugins.hookspecs import Check
from seer_sglang import SUPPORTED_SGLANG

__all__ = ["GPU_SETUP", "SETUP", "beside", "installation", "interpreter"]

PART = "sglang"
GPU_COMMAND = "`pip install -e './backends/sglang[gpu]'`"
GPU_SETUP = how_to_install("sglang", GPU_COMMAND)
SETUP = how_to_install("sglang", f"`make setup-sglang` (GPU: {GPU_COMMAND})")
ENVIRONMENT = ".venv-sglang"
NEEDED = ("torch", "seer-worker")
STANDIN = "seer-sgl-kernel-standin"


def beside() -> Path:
    """Return where ``make setup-sglang`` puts an interpreter: beside the environment of this one."""
    return Path(sys.prefix).parent / ENVIRONMENT / "bin" / "python"


def interpreter() -> str | None:
    """Return the interpreter whose environment has SGLang: this one, or the one beside; None if neither."""
    try:
        version("sglang")
    except PackageNotFoundError:
        return str(beside()) if os.access(beside(), os.X_OK) else None
    return sys.executable


def installation(python: str | None, needed: Sequence[str] = NEEDED) -> list[Check]:
    """Look into an interpreter's environment for SGLang and what is ``needed`` beside it."""
    if python is None:
        return [Check(PART, False, f"SGLang is neither here nor in {beside()}", SETUP)]
    if not os.access(python, os.X_OK) or Path(python).is_dir():
        return [Check(PART, False, f"{python} is no interpreter", "correct [engine.sglang].python")]
    try:
        found = versions_under(python, ("sglang", STANDIN, *needed))
    except SeerError as error:
        return [Check(PART, False, str(error), "correct [engine.sglang].python")]
    finding = f"SGLang {found.get('sglang', '-')} under {python}"
    if found.get("sglang") != SUPPORTED_SGLANG:
        return [Check(PART, False, finding, f"keyed sampling needs {SUPPORTED_SGLANG}: {SETUP}")]
    checks = [Check(PART, True, finding, "")]
    for name in needed:
        there = name in found
        checks.append(Check(PART, there, f"{name} {found.get(name, '-')}", "" if there else SETUP))
    if STANDIN in found:
        gpu = Path("/dev/nvidiactl").exists()
        remedy = f"pip uninstall {STANDIN} there; {GPU_SETUP}"
        finding = "a stand-in for SGLang's kernels, " + ("and a GPU" if gpu else "as is right without a GPU")
        checks.append(Check(PART, not gpu, finding, remedy if gpu else ""))
    return checks
