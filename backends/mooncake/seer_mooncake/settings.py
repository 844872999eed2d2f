"""The settings in ``[kv_pool.mooncake]``."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

__all__ = ["Settings"]


class Settings(Struct, frozen=True):
    """``[kv_pool.mooncake]``: ``capacity_bytes`` and ``disk_bytes``, 0 for none, are over all instances.

    The disk tier lies in the directory ``disk_path``, relative to the config file, or else where temporary
    files go.  ``master`` joins the one at ``host:port`` instead of starting one.  ``host`` is this machine
    as the others reach it.  ``buffer_bytes`` is what one instance copies through.  ``on_failure`` decides
    whether a run whose master does not answer within ``start_timeout_s`` ends, or goes on without a pool;
    ``timeout_s`` bounds every later call.
    """

    capacity_bytes: Annotated[int, Meta(ge=16 << 20)] = 1 << 30
    buffer_bytes: Annotated[int, Meta(ge=1 << 20)] = 16 << 20
    disk_bytes: Annotated[int, Meta(ge=0)] = 0
    disk_path: str | None = None
    master: Annotated[str, Meta(pattern=r"^([^\s:]+:\d+)?$")] = ""
    host: str = "127.0.0.1"
    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = ""
    on_failure: Literal["fail", "go_on"] = "fail"
    start_timeout_s: Annotated[float, Meta(gt=0, le=60)] = 5.0
    timeout_s: Annotated[float, Meta(gt=0, le=60)] = 2.0
