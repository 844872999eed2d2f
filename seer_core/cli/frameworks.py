"""What it takes to train with somebody else's framework: its adapter, and the framework itself."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import attrs

from seer_core.errors import SeerError
from seer_core.hookspecs import Check
from seer_core.interpreters import versions_under

__all__ = ["examine_frameworks", "verl"]

NEEDED = ("verl", "seer-verl", "seer-client", "torch")
"""Of the environment of verl."""


@attrs.frozen
class Framework:
    """One whose trainer runs beside Seer; ``file`` of its package tells it from others of its name.

    ``get`` is how it comes here.
    """

    name: str
    package: str
    file: str
    get: str

    @property
    def part(self) -> str:
        """What it is called where a shell is used."""
        return self.name.lower()


FRAMEWORKS = (
    Framework("TRL", "trl", "trainer/grpo_trainer.py", "pip install 'trl>=1.16,<1.17'"),
    Framework("slime", "slime", "rollout/base_types.py", "git clone https://github.com/THUDM/slime"),
    Framework(
        "SkyRL",
        "skyrl",
        "train/entrypoints/main_base.py",
        "git clone https://github.com/NovaSky-AI/SkyRL",
    ),
)


def examine_frameworks() -> list[Check]:
    """Say which frameworks can be trained with; whoever uses none lacks nothing."""
    return [*map(_beside_seer, FRAMEWORKS), verl(Path(sys.prefix).parent / ".venv-verl" / "bin" / "python")]


def verl(python: Path) -> Check:
    """Look into the environment of verl, which excludes that of Seer's engines."""
    own = "or, in an environment of verl's that is yours: pip install ./client ./adapters/verl (docs/verl.md)"
    if not os.access(python, os.X_OK):
        finding = f"no environment of verl's at {python.parent.parent}; only who trains with verl needs it"
        return Check("verl", True, finding, f"make setup-verl; {own}")
    try:
        found = versions_under(python, NEEDED)
    except SeerError as error:
        return Check("verl", False, str(error), "rm -r .venv-verl; make setup-verl")
    missing = [name for name in NEEDED if name not in found]
    if missing:
        finding = f"{', '.join(missing)} not in {python.parent.parent}"
        return Check("verl", False, finding, f"make setup-verl; {own}")
    return Check("verl", True, f"verl {found['verl']}, seer-verl {found['seer-verl']} under {python}", "")


def _beside_seer(framework: Framework) -> Check:
    name, part = framework.name, framework.part
    try:
        adapter = version(f"seer-{part}")
    except PackageNotFoundError:
        adapter = None
    try:
        spec = find_spec(framework.package)
    except ValueError:  # a module of that name which was made by hand
        spec = None
    places = (spec.submodule_search_locations or []) if spec is not None else []
    here = any((Path(place) / framework.file).is_file() for place in places)
    if adapter and here:
        return Check(part, True, f"{name} in {next(iter(places))}, seer-{part} {adapter}", "")
    lacking = [*([] if here else [name]), *([] if adapter else [f"seer-{part}"])]
    steps = [*([] if here else [framework.get]), *([] if adapter else [f"pip install ./adapters/{part}"])]
    finding = f"{' and '.join(lacking)} not in this environment; only who trains with {name} needs it"
    return Check(part, True, finding, f"{'; '.join(steps)} (docs/{part}.md)")
