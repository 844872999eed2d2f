"""Engines of several kinds in one fleet, so that a request may go on on either."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import attrs
import msgspec

from seer_core.errors import ConfigError
from seer_core.ports.clock import RealClock
from seer_core.ports.engine import ChangingFleet, EngineFleet, InstanceClient, ModelInfo, PlainFleet

__all__ = ["merge_fleets"]


def merge_fleets(fleets: Mapping[str, EngineFleet]) -> EngineFleet:
    """Return one fleet with the engines of all, which are given by the names of their plug-ins.

    Its prompts respect the limits of each.  Its tokenizer is the first that there is.

    Raises:
        ConfigError: the fleets do not serve one model, or do not all live on the machine's clock.
    """
    first, *others = fleets
    if not others:
        return fleets[first]
    for name, fleet in fleets.items():
        if not isinstance(fleet.clock, RealClock):
            raise ConfigError(
                f"[seer].engine: {name!r} lives on a clock of its own, and engines of several kinds need"
                f" the machine's; name {name!r} alone, or leave it out"
            )
    _agree(fleets, "vocabularies", lambda model: model.vocab_size)
    _agree(fleets, "model files", lambda model: model.digest)
    models = [fleet.model for fleet in fleets.values()]
    attachments = [model.divided_attachments for model in models]
    temperatures = [model.max_temperature for model in models if model.max_temperature is not None]
    model = msgspec.structs.replace(
        models[0],
        max_model_tokens=min(model.max_model_tokens for model in models),
        max_temperature=min(temperatures, default=None),
        controls=_common([model.controls for model in models]),
        whole_controls=tuple(dict.fromkeys(name for model in models for name in model.whole_controls)),
        divided_attachments=None if None in attachments else _common([each or () for each in attachments]),
        takes_images=all(model.takes_images for model in models),
    )
    tokenizers = (fleet.tokenizer for fleet in fleets.values() if fleet.tokenizer is not None)
    engines = [engine for fleet in fleets.values() for engine in fleet.engines]
    merged = PlainFleet(engines, fleets[first].clock, model, next(tokenizers, None))
    changing = [fleet for fleet in fleets.values() if isinstance(fleet, ChangingFleet)]
    return (
        MergedFleet(merged.engines, merged.clock, model, merged.tokenizer, changing) if changing else merged
    )


@attrs.frozen
class MergedFleet(PlainFleet):
    """Fleets of several kinds, of which these change while a run goes on."""

    changing: Sequence[ChangingFleet]

    async def follow(
        self,
        join: Callable[[InstanceClient], Awaitable[object]],
        leave: Callable[[str], Awaitable[object]],
    ) -> None:
        """Announce what joins or leaves any of them."""
        await asyncio.gather(*(fleet.follow(join, leave) for fleet in self.changing))


def _common(names: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names that all have."""
    return tuple(name for name in names[0] if all(name in each for each in names))


def _agree(fleets: Mapping[str, EngineFleet], what: str, of: Callable[[ModelInfo], Any]) -> None:
    """Refuse fleets of different models; an unknown value, 0 or "", agrees with all."""
    known = {name: of(fleet.model) for name, fleet in fleets.items() if of(fleet.model)}
    for name in known:
        one = next(iter(known))
        if known[name] != known[one]:
            raise ConfigError(
                f"[seer].engine: {one!r} and {name!r} have different {what}; a request can move between"
                f" them only if [engine.{one}] and [engine.{name}] name the same model"
            )
