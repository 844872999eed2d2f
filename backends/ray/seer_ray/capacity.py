"""Counts for how many instances a cluster has room: ``python -m seer_ray.capacity``, for ``seer doctor``.

Reads ``[launcher.ray]`` as JSON from standard input and writes a ``Capacity``, a line of JSON.  It is a
process of its own, because Ray gives up late, and stays in a process that has joined.
"""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec

from seer_core.errors import EngineError
from seer_core.plugins.hookspecs import Check
from seer_ray.settings import TABLE, Settings

__all__ = ["Capacity", "examine_cluster"]

LIMIT_S = 30.0
"""More than Ray takes to refuse a wrong token."""
SHOWN = 8
"""How many nodes a finding names."""


class Capacity(msgspec.Struct):
    """The room on each node by name, and what is missing for one more instance; or why neither is known."""

    nodes: list[tuple[str, int]] = []
    missing: str = ""
    flaw: str = ""


def examine_cluster(settings: Settings) -> Check:
    """Ask the cluster that settings name, within a limit, what room it has for instances."""
    command = [sys.executable, "-P", "-m", "seer_ray.capacity"]
    where, hint = settings.named_address, "see `ray status`"
    try:
        done = subprocess.run(
            command, input=msgspec.json.encode(settings), capture_output=True, timeout=LIMIT_S
        )
        capacity = msgspec.json.decode(done.stdout.splitlines()[-1], type=Capacity)
    except subprocess.TimeoutExpired:
        capacity = Capacity(flaw=f"the Ray cluster at {where} has not answered within {LIMIT_S:g} s; {hint}")
    except (OSError, IndexError, msgspec.MsgspecError) as error:
        capacity = Capacity(flaw=f"Ray is not to be asked: {type(error).__name__}; {hint}")
    if capacity.flaw:
        finding, _, remedy = capacity.flaw.rpartition("; ")
        return Check("ray", False, finding, remedy)
    count = sum(room for _, room in capacity.nodes)
    each = ", ".join(f"{name} {room}" for name, room in capacity.nodes[:SHOWN])
    more = ", ..." if len(capacity.nodes) > SHOWN else ""
    finding = f"the Ray cluster at {where} has room for {count} instances now ({each or 'no node'}{more})"
    if count >= max(1, settings.min_instances):
        return Check("ray", True, finding, "")
    lack = f"min_instances is {settings.min_instances}" if count else capacity.missing
    return Check("ray", False, f"{finding}; {lack}", f"add a node, or lower what [{TABLE}] asks for")


def _count(settings: Settings) -> Capacity:
    from seer_ray import cluster, places

    try:
        cluster.join(settings)
        return Capacity(places.room(settings), places.lacking(settings) or places.shortage(settings))
    except EngineError as error:
        return Capacity(flaw=str(error))
    except Exception as error:
        return Capacity(flaw=f"Ray refuses: {type(error).__name__}; see `ray status`")


if __name__ == "__main__":
    given = msgspec.json.decode(sys.stdin.buffer.read(), type=Settings)
    print(msgspec.json.encode(_count(given)).decode(), flush=True)
    os._exit(0)  # Ray's own end may wait for a head that is gone
