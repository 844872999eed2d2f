"""The doctor: what this machine lacks for which part, and the remedy."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from seer_host.config_files import Config
from seer_session.assembly import installed, load, load_enabled, startup_of
from seer_session.hooks import Plugin, SeerPluginManager

from seer_cli.verl_environment import examine_verl
from seer_core.error_origin import describe_error
from seer_core.errors import SeerError
from seer_core.plugins.hookspecs import Check, Startup

__all__ = ["examine"]

LEAST_PYTHON = (3, 11)
BELOW_PYTHON = (3, 14)


def examine(config: Config | None) -> list[Check]:
    """Examine the core and the plug-ins that a config enables, or all that are installed, and verl."""
    checks = [_python(), _machine()]
    if config is not None:
        plugins = [plugin for _, plugin in load_enabled(config)]
        manager = SeerPluginManager(plugins, config.blocked, debug=config.seer.debug)
        return [*checks, *(check for each in plugins for check in _ask(manager, each, startup_of(config)))]
    for name in installed():
        try:
            plugin = load(name, None, name)
            manager = SeerPluginManager([plugin])
        except SeerError as error:
            checks.append(Check(name, False, str(error), "reinstall or uninstall it"))
            continue
        checks += _ask(manager, plugin, None)
    return [*checks, examine_verl(Path(sys.prefix).parent / ".venv-verl" / "bin" / "python")]


def _ask(manager: SeerPluginManager, plugin: Plugin, startup: Startup | None) -> list[Check]:
    try:
        answers = manager.call(plugin, "doctor", settings=plugin.settings, startup=startup)
        return [check for answer in answers for check in answer]
    except Exception as error:
        name, module = manager.who_raised(plugin, "doctor", error)
        return [
            Check(
                name,
                False,
                f"hook 'seer_doctor' raised {describe_error(error, module)}",
                "report it to its author",
            )
        ]


def _python() -> Check:
    good = LEAST_PYTHON <= sys.version_info[:2] < BELOW_PYTHON
    return Check(
        "core", good, f"Python {platform.python_version()}", "" if good else "use Python 3.11, 3.12 or 3.13"
    )


def _machine() -> Check:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Check("core", True, f"{os.cpu_count()} CPUs, {memory / 2**30:.0f} GiB of memory", "")
