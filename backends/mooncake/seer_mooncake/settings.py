"""The settings in ``[kv_pool.mooncake]``."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

__all__ = ["Settings"]


class Settings(Struct, frozen=True):
    """``[kv_pool.mooncake]``: a KV pool over several machines."""

    capacity_bytes: Annotated[int, Meta(ge=16 << 20)] = 1 << 30
    """The memory of the pool, over all instances."""
    buffer_bytes: Annotated[int, Meta(ge=1 << 20)] = 16 << 20
    """The buffer through which one instance copies."""
    disk_bytes: Annotated[int, Meta(ge=0)] = 0
    """The disk that the pool takes, over all instances; 0 for none."""
    disk_path: str | None = None
    """The directory of the disk tier, relative to the config file, and on a cluster on each node. Without it:
    where temporary files go.
    """
    master: Annotated[str, Meta(pattern=r"^([^\s:]+:\d+)?$")] = ""
    """A running master to join, as ``host:port``; empty starts one on this machine."""
    host: str = ""
    """The name or address under which others reach the instances of this machine. Empty: loopback, and on a
    cluster the address of each instance's node, as measured there.
    """
    protocol: Literal["tcp", "rdma"] = "tcp"
    """How blocks are transferred between machines."""
    device: str = ""
    """The network device that Mooncake's transfers use; empty leaves the choice to Mooncake."""
    on_failure: Literal["fail", "go_on"] = "fail"
    """Whether a run whose master does not answer in time ends, or goes on without a pool."""
    start_timeout_s: Annotated[float, Meta(gt=0, le=60)] = 5.0
    """How long the master may take until it answers for the first time."""
    timeout_s: Annotated[float, Meta(gt=0, le=60)] = 2.0
    """How long each later call may take."""
