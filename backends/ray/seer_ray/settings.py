"""``[launcher.ray]``.  Imports no Ray."""

from __future__ import annotations

import os
from typing import Annotated

from msgspec import Meta, Struct

from seer_core.plugins.config_types import NotNegative, Positive, Seconds

__all__ = ["TABLE", "Settings"]

TABLE = "launcher.ray"


class Settings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[launcher.ray]``: the cluster, and what each instance takes of one of its nodes."""

    address: str = ""
    """The cluster to join, as ``ray.init`` takes it: ``auto`` for the one of this machine, or ``HOST:PORT``
    of its head. Empty: that of the Ray program which runs Seer, or of RAY_ADDRESS; without either, one is
    started on this machine.
    """
    cpus: NotNegative = 1.0
    """The CPUs that an instance reserves on its node."""
    gpus: Annotated[int, Meta(ge=0, le=128)] = 0
    """The GPUs that an instance reserves; Ray chooses them, and the worker sees these alone."""
    memory_bytes: Annotated[int, Meta(ge=0)] = 0
    """The main memory that an instance reserves; 0 reserves none."""
    resources: dict[str, Positive] = {}
    """Further resources of the cluster that an instance reserves, by name."""
    labels: dict[str, str] = {}
    """The labels that a node must have, as Ray's label selectors."""
    placement_groups: list[str] = []
    """Placement groups of your program, by name in its namespace or by id in hexadecimal. Each instance takes
    a free bundle of them, and leaves the groups as they are. Empty: each has a group of its own.
    """
    min_instances: Annotated[int, Meta(ge=0)] = 0
    """How many instances must have a place before a run begins; the others wait for one and join when a node
    has room. 0 means all.
    """
    autoscaler: bool = False
    """Whether Ray adds nodes to the cluster by itself. A start then waits up to ``launch_timeout_s`` also for
    what no node has yet, and does not end at once.
    """
    host: str = ""
    """This machine's address at which workers connect; empty for the one that Ray uses."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """The port at which they connect; 0 means any free one."""
    launch_timeout_s: Seconds = 60.0
    """The limit for each step of a launch: a place on a node, the actor there, the worker's connection."""

    @property
    def named_address(self) -> str:
        """The address of a cluster that is there already; empty if none is named."""
        return self.address or os.environ.get("RAY_ADDRESS", "")

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one instance, as Ray names them."""
        own = {"CPU": self.cpus, "GPU": float(self.gpus), "memory": float(self.memory_bytes)}
        return {name: value for name, value in own.items() if value} | self.resources
