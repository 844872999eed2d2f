"""Measurements that instances of this machine have made of themselves, kept for others like them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from seer_worker.wire import Measured, Start

__all__ = ["keep", "recall"]

_kept: dict[bytes, Measured] = {}


def recall(interpreter: str, environment: Mapping[str, str], start: Start) -> Measured | None:
    """Return what an instance like this one has measured, None if there was none."""
    try:
        return _kept.get(_likeness(interpreter, environment, start))
    except RecursionError:  # settings that are nested too deeply for the wire as well, which refuses them
        return None


def keep(interpreter: str, environment: Mapping[str, str], start: Start, measured: Measured | None) -> None:
    """Keep what an instance has measured."""
    if measured is not None:
        _kept[_likeness(interpreter, environment, start)] = measured


def _likeness(interpreter: str, environment: Mapping[str, str], start: Start) -> bytes:
    """Return what all instances have in common that take the same time for the same step.

    The worker itself compares the kind of device.  Settings of a draft source or a pool name what is an
    instance's own, such as sockets, and change no step.
    """
    threads = {name: value for name, value in environment.items() if name.endswith("_NUM_THREADS")}
    source = start.source and (start.source.path, start.source.draft_tokens, start.source.step_times)
    parts = interpreter, threads, start.instance, start.settings, source, start.store and start.store.path
    return msgspec.msgpack.encode(parts, order="deterministic")
