"""The packages that this environment, and that of another interpreter, has installed; for the doctor."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from seer_core.errors import SeerError
from seer_core.plugins.hookspecs import Check

__all__ = ["check_framework", "versions_under"]

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
    """Return the versions of those of the distributions that an interpreter has, importing none.

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


def check_framework(adapter: str, name: str, package: str, file: str, remedy: str) -> Check:
    """Return whether the framework of an adapter is installed beside it.

    ``file`` of the framework's package distinguishes it from another package of that name.  A framework that
    is missing is no fault, since only its users need it.
    """
    try:
        spec = find_spec(package)
    except ValueError:  # a module of that name which was made by hand
        spec = None
    places = (spec.submodule_search_locations or []) if spec is not None else []
    for place in places:
        if (Path(place) / file).is_file():
            return Check(adapter, True, f"{name} in {place}, seer-{adapter} {version(f'seer-{adapter}')}", "")
    finding = f"{name} not in this environment; only training with {name} needs it"
    return Check(adapter, True, finding, f"{remedy} (docs/guides/{adapter}.md)")
