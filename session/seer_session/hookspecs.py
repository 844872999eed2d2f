"""The hooks of which the core has no use: that of launchers, the first of all, and that of environments.

Environments are asked for between drafters and observers.  The rest is as in ``seer_core.plugins.hookspecs``,
which has the other hooks.
"""

from __future__ import annotations

from typing import Any

from seer_host.launcher import Launcher

from seer_core.plugins.hookspecs import Startup, hookspec
from seer_session.environment import Environment


@hookspec
def seer_make_launcher(settings: Any, startup: Startup) -> Launcher | None:
    """Return what starts the workers of engines, on this machine or elsewhere.

    Called once, first of all hooks, and only for the plug-in that ``[seer].launcher`` names; ``settings`` is
    its ``[launcher.NAME]`` table.  Must start nothing: ``Launcher.launch`` is called as engines start.
    """


@hookspec
def seer_make_environment(settings: Any, startup: Startup) -> Environment | None:
    """Return what answers the turns of responses, such as a tool or a game, or None to abstain.

    Called once, in the order of ``[seer].plugins``.  One enabled plug-in fills the slot; where
    two would, ``[seer.slots]`` says which.  Must start nothing: ``Environment.start`` is called before the
    engines start.  Without an answer, a response is over where the model stops.
    """
