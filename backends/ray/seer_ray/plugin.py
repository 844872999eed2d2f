"""The plug-in ``ray``: settings, the launcher, and what it needs.  Imports no Ray until a run uses it."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from seer_host.installation import how_to_install
from seer_host.launcher import Launcher

from seer_core.errors import ConfigError
from seer_core.plugins.hookspecs import Check, hookimpl
from seer_ray.capacity import examine_cluster
from seer_ray.settings import TABLE, Settings

__all__ = ["TIER", "Settings", "seer_doctor", "seer_make_launcher"]

TIER = "experimental"

HEAD_RETURN_S = 24 * 3600
"""How long Ray lets this process live without a head; its own default ends the process after a minute."""


@hookimpl
def seer_make_launcher(settings: Settings) -> Launcher:
    """Return the launcher, which joins the cluster when the first worker is launched."""
    if settings.placement_groups and settings.labels:
        raise ConfigError(
            f"[{TABLE}] asks for labels and for placement groups, whose nodes are chosen already; leave out"
            " one of the two"
        )
    # Parts of Ray read it when they are imported.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(HEAD_RETURN_S))
    from seer_ray.launcher import RayLauncher

    return RayLauncher(settings)


@hookimpl
def seer_doctor(settings: Settings | None) -> list[Check]:
    """Look for Ray, and report what an instance takes and where."""
    try:
        found = version("ray")
    except PackageNotFoundError:
        return [Check("ray", False, "Ray is not installed", how_to_install("ray", "`make setup`"))]
    checks = [Check("ray", True, f"Ray {found}", "")]
    if settings is None:
        return checks
    if not settings.bundle:
        remedy = "set cpus, gpus or resources in [launcher.ray], or all instances may share a node"
        return [*checks, Check("ray", False, "an instance takes nothing", remedy)]
    wanted = ", ".join(f"{value:g} {name}" for name, value in settings.bundle.items())
    if settings.placement_groups:
        where = "placement groups of a program, which are not looked for here"
    else:
        where = settings.named_address or "the program's own, or one started here"
    checks.append(Check("ray", True, f"cluster: {where}; an instance takes {wanted}", ""))
    if settings.named_address not in ("", "local") and not settings.placement_groups:
        checks.append(examine_cluster(settings))
    return checks
