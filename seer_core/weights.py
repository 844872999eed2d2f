"""New weights for engines: what a trainer, an engine and the core agree on.

A trainer names weights by a ``WeightSpec``.  What reads them, a ``WeightSource``, is named by import path and
made in each engine's process; so an engine knows this Protocol, and never where weights come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

__all__ = ["DIRECTORY", "WeightSource", "WeightSpec", "directory"]

DIRECTORY = "seer_host.checkpoint:Directory"
"""The source that reads a directory of safetensors, the one that the runtime copies itself."""


class WeightSpec(msgspec.Struct, frozen=True):
    """Weights, by name: what an engine's process imports to read them and what it is made with.

    ``path`` is ``package.module:Class``, a ``WeightSource`` called with ``(settings)``; ``settings`` is plain
    data.
    """

    path: str
    settings: Mapping[str, Any]

    def __str__(self) -> str:
        return self.path if self.directory is None else self.directory

    @property
    def directory(self) -> str | None:
        """The directory of safetensors that holds them; None if they are elsewhere."""
        return self.settings["directory"] if self.path == DIRECTORY else None


def directory(path: str | Path) -> WeightSpec:
    """Return what names the safetensors of a directory."""
    return WeightSpec(DIRECTORY, {"directory": str(path)})


class WeightSource(Protocol):
    """The weights of one version, in an engine's process; used by one thread.

    Made by ``Class(settings)`` for an update, in each process of the engine that holds weights; an
    ``EngineError`` says why it cannot be made or read, and is a refusal as long as nothing has been loaded.

    They are read several times: all names, shapes and values are checked before the first is loaded, and
    every instance that starts before the next update, after a loss say, reads them again.  So they must stay
    as they are until then, and that is whoever's business who names the source.  The runtime sees to it for a
    directory of safetensors alone, of which it makes a copy.  Values that pass once, as in a broadcast, have
    to be put where they can be read again before ``update_weights`` is called: into memory that the engines'
    processes share, or into a directory.
    """

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Yield every tensor of the model, a torch tensor on any device, with its name in checkpoints.

        It begins with the first whenever it is called, and nobody writes into what it yields.
        """
        ...
