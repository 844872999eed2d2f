"""The profile of an engine: what ``seer profile`` writes, and what draws conclusions from it reads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec
from seer_host.json_files import JsonFormat

from seer_core.errors import ConfigError
from seer_core.model import InstanceInfo
from seer_core.ports.drafting import StepTimes
from seer_core.ports.engine import InstanceClient

__all__ = ["Profile", "make_profile", "mean_info", "mean_times", "measure_tables", "read_profile"]


class Profile(StepTimes, frozen=True):
    """Step times at one length of context, the same at further lengths, and their instances."""

    more: tuple[StepTimes, ...] = ()
    """Step times at further lengths of context."""
    engine: str = ""
    """The plug-in that made the instances."""
    instances: int = 1
    """How many instances it made."""
    together: bool = False
    """Whether all instances made steps at the same time, as they do in a run."""
    info: InstanceInfo | None = None
    """The limits of one instance."""

    @property
    def tables(self) -> tuple[StepTimes, ...]:
        """Step times at all lengths of context."""
        return (self, *self.more)


def make_profile(
    tables: Sequence[StepTimes], infos: Sequence[InstanceInfo], *, engine: str, instances: int, together: bool
) -> Profile:
    """Return the profile of these tables, one for each length of context, and of instances like ``infos``."""
    first, *more = tables
    return Profile(
        batch=first.batch,
        draft_tokens=first.draft_tokens,
        seconds=first.seconds,
        context_tokens=first.context_tokens,
        more=tuple(more),
        engine=engine,
        instances=instances,
        together=together,
        info=mean_info(infos),
    )


async def measure_tables(
    engines: Sequence[InstanceClient],
    batch: Sequence[int],
    draft_tokens: Sequence[int],
    contexts: Sequence[int | None],
) -> list[StepTimes]:
    """Measure all engines at the same time, and return their mean for each length of context.

    None leaves the length to the engines.

    Raises:
        ConfigError, EngineError: see ``mean_times`` and ``InstanceClient.measure_steps``.
    """
    tables = []
    for context in contexts:
        # A plug-in's engine need not take a length of context where none is asked for.
        more = () if context is None else (context,)
        measured = [engine.measure_steps(batch, draft_tokens, *more) for engine in engines]
        tables.append(mean_times(await asyncio.gather(*measured)))
    return tables


def mean_times(tables: Sequence[StepTimes]) -> StepTimes:
    """Return the mean of several instances' times, of the batches that all of them could run.

    Raises:
        ConfigError: there is no such batch.
    """
    batch = [size for size in tables[0].batch if all(size in table.batch for table in tables)]
    if not batch or any(table.draft_tokens != tables[0].draft_tokens for table in tables):
        raise ConfigError("the instances can run no batch in common; measure one of them alone")
    rows = [[table.seconds[table.batch.index(size)] for table in tables] for size in batch]
    seconds = tuple(tuple(fmean(cell) for cell in zip(*row, strict=True)) for row in rows)
    context = round(fmean(table.context_tokens for table in tables))
    return StepTimes(tuple(batch), tables[0].draft_tokens, seconds, context)


MEASURED = ("prefill_s_per_token", "step_s", "chunk_s", "chunk_s_per_token")
"""Times of an ``InstanceInfo`` that every instance has; 0 where it did not measure them."""


def mean_info(infos: Sequence[InstanceInfo]) -> InstanceInfo:
    """Return the first instance's, with the mean of each time over those that measured it."""
    fetches = [info.fetch_s_per_token for info in infos if info.fetch_s_per_token is not None]
    times = {name: [seconds for info in infos if (seconds := getattr(info, name))] for name in MEASURED}
    return msgspec.structs.replace(
        infos[0],
        **{name: fmean(found) if found else 0.0 for name, found in times.items()},
        fetch_s_per_token=fmean(fetches) if fetches else None,
    )


def read_profile(path: str | Path) -> Profile:
    """Read what ``seer profile`` has written.

    Raises:
        ConfigError: it is no profile.
    """
    return _PROFILE.read(path)


_PROFILE = JsonFormat[Profile](Profile, "no profile", "write one with `seer profile`", ConfigError)
