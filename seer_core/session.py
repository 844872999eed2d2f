"""Rolling out where no event loop runs: the short form for scripts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from seer_core.config import Config
from seer_core.errors import SeerError
from seer_core.policy import Observer
from seer_core.result import RolloutResult
from seer_core.runtime import Runtime

__all__ = ["rollout"]


def rollout(
    config: Config | str | Path,
    records: Iterable[Mapping[str, Any]],
    iteration: int = 0,
    observers: Iterable[Observer] = (),
) -> RolloutResult:
    """Start engines, roll out prompts, stop engines, return the result: the short form for scripts.

    ``records`` have the fields of a prompts file's lines.  A script that trains gives the number of its
    ``iteration``: the same prompts get the same responses where it is the same.  Call it where no event loop
    runs; with one, use ``Runtime``.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise SeerError(
            "seer_core.rollout() runs an event loop of its own, and one is running here already; use"
            " `async with Runtime.from_config(config) as runtime` instead"
        )

    async def run() -> RolloutResult:
        async with Runtime.from_config(config, observers) as runtime:
            return await runtime.rollout(runtime.groups(records, iteration)).wait()

    return asyncio.run(run())
