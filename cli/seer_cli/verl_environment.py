"""The environment of verl, which excludes Seer's: its adapter is not installed here, and answers no hook."""

from __future__ import annotations

import os
from pathlib import Path

from seer_host.installation import in_checkout
from seer_host.interpreters import versions_under

from seer_core.errors import SeerError
from seer_core.plugins.hookspecs import Check

__all__ = ["examine_verl"]

NEEDED = ("verl", "seer-verl", "seer-client", "torch")
"""Of the environment of verl."""

FROM_WHEELS = "run `pip install seer-verl` in the environment of verl (docs/guides/verl.md)"
FROM_CHECKOUT = (
    "run `make setup-verl` in Seer's checkout; or, in an environment of verl, the command in"
    " docs/guides/verl.md"
)
SETUP = FROM_CHECKOUT if in_checkout() else FROM_WHEELS


def examine_verl(python: Path) -> Check:
    """Look into the environment of verl, which excludes that of Seer's engines."""
    if not os.access(python, os.X_OK):
        finding = f"no environment of verl's at {python.parent.parent}; only training with verl needs it"
        return Check("verl", True, finding, SETUP)
    try:
        found = versions_under(python, NEEDED)
    except SeerError as error:
        return Check("verl", False, str(error), "rm -r .venv-verl; make setup-verl")
    missing = [name for name in NEEDED if name not in found]
    if missing:
        finding = f"{', '.join(missing)} not in {python.parent.parent}"
        return Check("verl", False, finding, SETUP)
    return Check("verl", True, f"verl {found['verl']}, seer-verl {found['seer-verl']} under {python}", "")
