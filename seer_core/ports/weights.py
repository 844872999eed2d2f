"""New weights for engines: the contract of trainers, engines and the core.

A ``WeightSpec`` names the weights of one version, whole ones or an adapter.  Each engine's process makes a
``WeightSource`` of it, once for an update, and reads the tensors; an engine depends on this Protocol alone.
A ``WeightStore`` keeps them for instances that start later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

__all__ = [
    "BROADCAST",
    "DIRECTORY",
    "FIRST_WEIGHTS",
    "OWNER",
    "SHARED_MEMORY",
    "VersionedWeights",
    "WeightSource",
    "WeightSpec",
    "WeightStore",
    "directory",
]

BROADCAST = "broadcast"
"""Short name of the source that receives what ``BroadcastWeights`` of ``seer-worker`` sends."""

DIRECTORY = "directory"
"""Short name of the source that reads a directory of safetensors, of which the runtime makes a copy."""

OWNER = "owner"
"""Short name of the source that stands for weights which a ``ForeignInstance`` has from its owner."""

SHARED_MEMORY = "shared_memory"
"""Short name of the source that reads what ``SharedWeights`` has written."""


class WeightSpec(msgspec.Struct, frozen=True):
    """A source of weights, by name, and its settings.

    ``path`` is ``package.module:Class``, a ``WeightSource`` called with ``(settings)``, or the short name of
    a built-in one; ``settings`` is plain data.  With ``adapter_config`` among them, which is PEFT's, the
    tensors are a LoRA adapter of the whole weights before them.  An engine that merges gets these again as
    the ``base``, unless they are those with which it has started.
    """

    path: str
    settings: Mapping[str, Any]
    base: WeightSpec | None = None

    def __str__(self) -> str:
        return self.path if self.directory is None else self.directory

    @property
    def directory(self) -> str | None:
        """The directory of safetensors that holds the weights; None if they are elsewhere."""
        return self.settings["directory"] if self.path == DIRECTORY else None

    @property
    def adapter_config(self) -> Mapping[str, Any] | None:
        """The content of an adapter's ``adapter_config.json``; None if the weights are whole."""
        return self.settings.get("adapter_config")


def directory(
    path: str | Path, digest: str = "", adapter_config: Mapping[str, Any] | None = None
) -> WeightSpec:
    """Return the spec of a directory of safetensors.

    The runtime adds the ``digest`` of its files, and the config if they are an adapter.
    """
    settings: dict[str, Any] = {"directory": str(path)}
    if digest:
        settings["digest"] = digest
    if adapter_config is not None:
        settings["adapter_config"] = adapter_config
    return WeightSpec(DIRECTORY, settings)


class VersionedWeights(msgspec.Struct, frozen=True):
    """Weights of one version: the ``source`` that the user named, and what is ``kept`` for engines to load.

    ``digest`` is over the names and bytes of what is kept; empty where nothing else than the source is.
    ``base`` are the whole weights to which an adapter belongs, unless those are the first.
    """

    version: int
    source: WeightSpec
    kept: WeightSpec
    digest: str = ""
    base: VersionedWeights | None = None


FIRST_WEIGHTS = VersionedWeights(0, directory(""), directory(""))
"""The weights with which engines start, from the place in their config."""


class WeightStore:
    """Keeps the current weights as they were for instances that start later; this one keeps the source alone.

    ``keep`` and ``check`` may block for as long as they read.
    """

    def keep(self, source: WeightSpec, version: int) -> VersionedWeights:
        """Keep what is in ``source`` now; an EngineError if that is impossible."""
        return VersionedWeights(version, source, source)

    def check(self, weights: VersionedWeights) -> None:
        """Raise EngineError if weights with a digest are gone or have changed since they were kept."""

    def drop(self, version: int) -> None:
        """Delete what is kept of a version, if there is anything."""

    def close(self, current: VersionedWeights) -> VersionedWeights:
        """Delete all that is kept; return the current weights as the next start loads them."""
        return current


class WeightSource(Protocol):
    """The weights of one version, in an engine's process; used by one thread.

    Made by ``Class(settings)`` for an update, in each process of the engine that holds weights; an
    ``EngineError`` says why it cannot be made or read, and is a refusal as long as nothing has been loaded.

    Tensors are read twice: all names, shapes and values are checked before the first is loaded.  Every
    instance that starts before the next update, after a loss say, reads them again.  So they must stay as
    they are until then, which the caller of ``update_weights`` has to ensure; of a directory of safetensors
    the runtime makes a copy.  Values that pass once, as in a broadcast, must be stored where they can be read
    again before ``update_weights`` is called: in memory that the engines' processes share, or in a directory.
    """

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Yield every tensor of the model, a torch tensor on any device, with its name in checkpoints.

        Each call begins with the first tensor; tensors must not be written to.
        """
        ...
