"""The plug-in ``transformers``, in the runtime's process, which imports neither torch nor transformers."""

from __future__ import annotations

import os

from seer_core.plugins.hookspecs import Startup, hookimpl
from seer_worker.client.devices import worker_environment
from seer_worker.client.fleet import WorkerFleet, WorkerSettings, make_fleet

__all__ = ["Settings", "seer_make_engines"]

INSTANCE = "seer_transformers.instance:TransformersInstance"
PRELOAD = "seer_transformers.preload:preload"


class Settings(WorkerSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[engine.transformers]``; ``dtype`` is one of torch's."""

    dtype: str = "float32"


@hookimpl
def seer_make_engines(settings: Settings, startup: Startup) -> WorkerFleet:
    """Return the instances, not yet started."""
    return make_fleet(
        "transformers",
        settings,
        startup,
        INSTANCE,
        {
            "model": str(startup.path(settings.model)),
            "dtype": settings.dtype,
            "max_running": settings.max_running,
            "max_model_tokens": settings.max_model_tokens,
        },
        [worker_environment(os.environ, threads=1, devices=())] * settings.instances,
        preload=PRELOAD,
        cannot_draft="does not draft; drop the drafter from [seer].plugins",
        ignores_kv_pool=True,
    )
