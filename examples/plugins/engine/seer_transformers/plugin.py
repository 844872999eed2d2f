"""The plug-in ``transformers``, in the runtime's process, which imports neither torch nor transformers."""

from __future__ import annotations

import os

from seer_host.fleet import WorkerFleet, WorkerSettings, make_fleet

from seer_core.hookspecs import Startup, hookimpl

__all__ = ["Settings", "seer_make_engines"]

INSTANCE = "seer_transformers.instance:TransformersInstance"


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
        [{**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}] * settings.instances,
        cannot_draft="does not draft; drop the drafter from [seer].plugins",
        ignores_kv_pool=True,
    )
