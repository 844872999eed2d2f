"""Divided rollout: requests run in chunks, each placed where there is KV for it."""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct
from seer_host.discovery import offered

from seer_core.errors import ConfigError, quote
from seer_core.plugins.config_types import MOST, NotNegative, Share
from seer_core.plugins.hookspecs import Startup, hookimpl
from seer_divided_rollout.placer import RESERVED_SHARE, KvAware, Scorer
from seer_divided_rollout.splitter import AffordableChunks, Chunks

__all__ = ["AffordableChunks", "Chunks", "KvAware", "Scorer", "Settings"]

TIER = "supported"

SCORERS = "seer.scorers"
"""Entry points of further reasons for an instance, each a ``Scorer``."""

SPEED = "speed"
"""The name of the placer's own scorer by speed."""

CLIENTS = "other_clients"
"""The name of the scorer by what other clients use."""

Weight = Annotated[float, Meta(ge=-MOST, le=MOST)]


class Settings(Struct, frozen=True):
    """``[plugin.divided_rollout]``: how long chunks are, and when a request moves.

    Where instances share KV, ``stay_kv_fraction`` and ``growth_headroom`` are multiplied by the cost of a
    move, as a share of prefilling again.
    """

    chunk_tokens: Annotated[int, Meta(ge=1)] | Annotated[str, Meta(pattern="^auto$")] = "auto"
    """The most tokens that a chunk may generate; ``auto`` takes as few as pay by measured times, and on
    servers that share no KV all that a response may still have.
    """
    stay_kv_fraction: Share = 0.25
    """A request stays on the instance that has its KV while that instance's free KV is at most this share of
    its capacity below the emptiest instance's.
    """
    growth_headroom: NotNegative = 0.75
    """Another instance takes a request only if this many chunks stay free there for each request in flight.
    """
    reserved_share: Annotated[float, Meta(gt=0, le=1)] = RESERVED_SHARE
    """The part of each chunk for which KV is reserved, on engines that end a chunk early where KV runs short,
    and on servers that run already. Other engines would preempt, so whole chunks are reserved there, as
    everywhere with 1.
    """
    scorers: Mapping[str, Weight] = {}
    """The weights of reasons for an instance beside its free KV: of ``speed``, which has 1 without an entry,
    and of those that installed distributions offer. 0 leaves a reason out.
    """


@hookimpl
def seer_make_splitter(settings: Settings, startup: Startup) -> Chunks | AffordableChunks:
    """Cut requests into chunks."""
    tokens = settings.chunk_tokens
    if isinstance(tokens, int):
        return Chunks(tokens)
    return AffordableChunks(whole_on_servers=_keeps_whole(settings))


@hookimpl
def seer_make_placer(settings: Settings, startup: Startup) -> KvAware:
    """Place chunks by free KV, and what else the settings weigh."""
    return KvAware(
        settings.stay_kv_fraction,
        settings.growth_headroom,
        settings.reserved_share,
        [(_scorer(name), weight) for name, weight in settings.scorers.items() if name != SPEED],
        settings.scorers.get(SPEED, 1.0),
        whole_on_servers=_keeps_whole(settings),
    )


def _keeps_whole(settings: Settings) -> bool:
    """Return whether servers that share no KV get whole responses: nothing else was asked for.

    What other clients use there is in the servers' reports.
    """
    weighed = {name for name, weight in settings.scorers.items() if weight}
    return settings.chunk_tokens == "auto" and weighed <= {SPEED, CLIENTS}


def _scorer(name: str) -> Scorer:
    """Return the scorer that an installed distribution offers under a name."""
    found = {point.name: point for point in offered(SCORERS)}
    if name not in found:
        raise ConfigError(
            f"[plugin.divided_rollout.scorers]: no installed distribution offers {quote(name)}"
            f"; known: {', '.join(sorted([SPEED, *found]))}"
        )
    scorer: Scorer = found[name].load()
    return scorer
