"""What another interpreter's environment has, for the doctor."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from seer_core.errors import SeerError

__all__ = ["versions_under"]

ASK_S = 60
ASK = """
import sys
from importlib.metadata import PackageNotFoundError, version
for name in sys.argv[1:]:
    try:
        print(name, version(name))
    except PackageNotFoundError:
        print(name, "-")
"""


def versions_under(python: str | Path, names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those of the distributions that an interpreter has, imported by nobody.

    Raises:
        SeerError: it does not answer.
    """
    try:
        command = [python, "-P", "-c", ASK, *names]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S)
        found = dict(line.split() for line in asked.stdout.splitlines())
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise SeerError(f"{python} does not answer: {error}") from error
    return {name: version for name, version in found.items() if version != "-"}
