"""The doctor: what this machine lacks for which part, and the remedy."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

from seer_cli.verl_environment import examine_verl
from seer_core.error_origin import describe_error
from seer_core.errors import SeerError
from seer_core.plugins.config import Config
from seer_core.plugins.hookspecs import Check, Startup
from seer_core.plugins.loading import Plugin, installed, load, load_enabled, startup_of

__all__ = ["examine"]

LEAST_PYTHON = (3, 11)
BELOW_PYTHON = (3, 14)


def examine(config: Config | None) -> list[Check]:
    """Examine the core and the plug-ins that a config enables, or all that are installed, and verl."""
    checks = [_python(), _machine()]
    if config is not None:
        startup = startup_of(config)
        for _, plugin in load_enabled(config):
            checks += _ask(plugin, plugin.settings, startup)
        return checks
    for name in installed():
        try:
            plugin = load(name, None, name)
        except SeerError as error:
            checks.append(Check(name, False, str(error), "reinstall or uninstall it"))
            continue
        checks += _ask(plugin, None, None)
    return [*checks, examine_verl(Path(sys.prefix).parent / ".venv-verl" / "bin" / "python")]


def _ask(plugin: Plugin, settings: Any, startup: Startup | None) -> list[Check]:
    if plugin.doctor is None:
        return []
    try:
        return plugin.doctor(settings=settings, startup=startup)
    except Exception as error:
        finding = f"hook 'seer_doctor' raised {describe_error(error, plugin.module)}"
        return [Check(plugin.name, False, finding, "report it to its author")]


def _python() -> Check:
    good = LEAST_PYTHON <= sys.version_info[:2] < BELOW_PYTHON
    return Check(
        "core", good, f"Python {platform.python_version()}", "" if good else "use Python 3.11, 3.12 or 3.13"
    )


def _machine() -> Check:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Check("core", True, f"{os.cpu_count()} CPUs, {memory / 2**30:.0f} GiB of memory", "")
