"""The hooks of the core, in the order of their calls.  The docstring is the contract.

Hooks called ``seer_make_<slot>`` are factories: pluggy calls each once, at start-up, for every enabled
plug-in, and it returns an object that fills a slot, or None to abstain.  After that the core calls plain
methods only.  Where the order is that of ``[seer].plugins``, ``tryfirst`` and ``trylast`` change it.
A function that is the hook of several slots, ``seer_make_placer = seer_make_prioritizer``, is called once,
and the object it returns fills them all.  A hook that asks for ``inner`` is given the strategy that its own
is to wrap: what the next name in ``[seer.slots]`` offers, or the core's own.
A plug-in is a module or object named by an entry point of the group ``seer``; beside its hooks it may
carry ``Settings``, a ``msgspec.Struct`` whose fields are the keys of its config table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pluggy

from seer_core.model.sampling import Sampling
from seer_core.ports.drafting import Drafter
from seer_core.ports.engine import EngineFleet
from seer_core.ports.kv import KVPool
from seer_core.ports.policy import Observer, Placer, Prioritizer, Splitter

__all__ = ["PROJECT", "Check", "Startup", "hookimpl", "hookspec"]

PROJECT = "seer"
"""Name of the entry-point group of plug-ins, and of their hooks' markers."""

hookspec = pluggy.HookspecMarker(PROJECT)
"""Marks the declaration of a hook; for the core alone."""

hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plug-in's function that answers a hook."""


class Startup(msgspec.Struct, frozen=True):
    """The run as every hook sees it: its seed, and where relative paths of the config start."""

    seed: int
    """The run's seed."""
    base_dir: Path
    """The directory of the config file."""
    workers_here: bool = True
    """Whether engines run on this machine; with a launcher they run where it puts them."""
    sampling: Sampling = Sampling()
    """The sampling of ``[rollout]``, without what a tokenizer has to read: bad words."""

    def path(self, text: str) -> Path:
        """Return a path of the config, taken relative to the config file."""
        return self.base_dir / Path(text).expanduser()


class Check(msgspec.Struct, frozen=True):
    """One finding of a doctor: the part it concerns, the fact, and the remedy if not ok."""

    part: str
    """The part that it concerns."""
    ok: bool
    """Whether the part can be used."""
    finding: str
    """The fact, in a few words."""
    remedy: str
    """How to mend it; empty if it is ok."""


@hookspec
def seer_make_engines(settings: Any, startup: Startup, launcher: Any) -> EngineFleet | None:
    """Return the engine instances, not yet started, on the clock they live on.

    Called once, after the launcher's, and only for a plug-in that ``[seer].engine`` names;
    ``settings`` is its ``[engine.NAME]`` table.  ``launcher`` starts the workers; None stands for child
    processes, and a hook that does not ask for it is refused where the config names one.

    Where several are named, their fleets become one, if they
    serve one model on the machine's clock (``seer_core.ports.clock.RealClock``).  Must not start processes or
    touch accelerators: the runtime starts the engines, in parallel, after every slot has been filled.
    """


@hookspec
def seer_make_kv_pool(settings: Any, startup: Startup, launcher: Any) -> KVPool | None:
    """Return the KV pool of all instances, not yet started.

    Called once, after the engines', and only for the plug-in that ``[seer].kv_pool`` names; ``settings`` is
    its ``[kv_pool.NAME]`` table.  ``launcher`` is that of the workers, None for child processes; a hook that
    does not ask for it is of one machine, and refused where the config names a launcher.

    Must start and allocate nothing: the runtime calls ``KVPool.start`` before it starts the engines, and only
    if they share KV.
    """


@hookspec
def seer_make_splitter(settings: Any, startup: Startup, inner: Splitter) -> Splitter | None:
    """Return the strategy that says how many tokens the next chunk may have, or None to abstain.

    Called once, in the order of ``[seer].plugins``.  One enabled plug-in fills the slot; where
    two would, ``[seer.slots]`` says which.  Without an answer, requests run whole.
    """


@hookspec
def seer_make_prioritizer(settings: Any, startup: Startup, inner: Prioritizer) -> Prioritizer | None:
    """Return the queue that orders waiting requests, or None to abstain.

    Called once, in the order of ``[seer].plugins``.  One enabled plug-in fills the slot; where
    two would, ``[seer.slots]`` says which.  Without an answer, requests go first come first served.
    """


@hookspec
def seer_make_placer(settings: Any, startup: Startup, inner: Placer) -> Placer | None:
    """Return the strategy that chooses the instance of a chunk, or None to abstain.

    Called once, in the order of ``[seer].plugins``.  One enabled plug-in fills the slot; where
    two would, ``[seer.slots]`` says which.  Without an answer, the least loaded instance is chosen.
    """


@hookspec
def seer_make_drafter(settings: Any, startup: Startup) -> Drafter | None:
    """Return what drafts tokens for all instances of the run, or None to abstain.

    Called once, in the order of ``[seer].plugins``.  One enabled plug-in fills the slot; where
    two would, ``[seer.slots]`` says which.  Must start nothing: what needs threads or connections
    is the source that ``Drafter.source`` names, which lives in each engine's worker and ends with
    ``DraftSource.stop``.  Without an answer, engines do not speculate.
    """


@hookspec
def seer_make_observer(settings: Any, startup: Startup) -> Observer | None:
    """Return an object that sees every event and its commands, or None to abstain.

    Called once, last of all hooks, in the order of ``[seer].plugins``; any number may answer.
    """


@hookspec
def seer_doctor(settings: Any | None, startup: Startup | None) -> list[Check]:  # type: ignore[empty-body]
    """Return what this plug-in needs of the machine, found or missing, with remedies.

    Called by the doctor's command only; any number may answer.  Both arguments are None when no config was
    named.  Must be quick, start nothing, and report a missing package instead of raising.
    """
