"""The cluster: joined, or started, once per process; its nodes, and what they lack.

All functions block; see ``threads``.
"""

from __future__ import annotations

import os
import secrets
import signal
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import ray
import structlog
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from seer_core.error_origin import one_line
from seer_core.errors import EngineError
from seer_ray.nurse import Nurse
from seer_ray.settings import TABLE, Settings
from seer_ray.signal_handlers import kept_handler

__all__ = [
    "SilentNodeError",
    "address",
    "draining",
    "join",
    "lacking",
    "make_nurse",
    "node_of",
    "release",
    "reserve",
    "shortage",
]

log = structlog.get_logger("seer")

_joining = threading.Lock()
NODE_ID = "ray.io/node-id"
"""The label that Ray gives each node."""


class SilentNodeError(EngineError):
    """A node that has a place for an instance starts no actor there: it is dead, and Ray has not noticed.

    Remedy: see `ray status`, and end that node, so that Ray places the instance on another.
    """

    def __init__(self, node_id: str, reason: str) -> None:
        super().__init__(f"node {node_id} has started no actor: {reason}; see `ray status`")
        self.node_id = node_id


def join(settings: Settings) -> str:
    """Join the cluster that settings name, unless this process is in one; return its address in it.

    On the main thread Ray would replace the handler of SIGTERM, so it must not be called there.

    Raises:
        EngineError: there is no such cluster, or it does not take this process.
    """
    with _joining:
        if not ray.is_initialized():
            starts = not (settings.address or os.environ.get("RAY_ADDRESS"))
            try:
                _init(
                    address=settings.address or None,
                    log_to_driver=False,
                    logging_level="error",
                    **({"include_dashboard": False} if starts else {}),
                )
            except Exception as error:
                where = settings.address or os.environ.get("RAY_ADDRESS") or "this machine"
                raise EngineError(
                    f"no Ray cluster at {where}: {type(error).__name__}: {one_line(error)}; start one with"
                    f" `ray start`, of this version of Ray and Python and with this token, or correct"
                    f" [{TABLE}].address"
                ) from error
            nodes = len(_nodes())
            log.info("ray_started" if starts else "ray_joined", nodes=nodes, ray=ray.__version__)
        return str(ray.util.get_node_ip_address())


def _init(**options: Any) -> None:
    """Call ``ray.init`` in a thread that lives as long as the process.

    The kernel kills the processes of a cluster that is started here when the thread that forked them ends.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            # Its own handler of SIGTERM calls the one before, and aborts the process three seconds later.
            with kept_handler(signal.SIGTERM):
                ray.init(**options)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)
            threading.Event().wait()

    threading.Thread(target=run, name="seer-ray-init", daemon=True).start()
    done.result()


def address() -> str:
    """Return the address of the cluster's head."""
    return str(ray.get_runtime_context().gcs_address)


def draining() -> list[str]:
    """Return the ids of the nodes that are being drained: by a user, an autoscaler or a notice of SIGTERM.

    Ray has no public function for it.
    """
    from ray._private.state import state

    return list(state.get_draining_nodes())


def reserve(settings: Settings, name: str, avoided: Collection[str] = ()) -> PlacementGroup:
    """Ask for a place for an instance: a group of one bundle, which is on one node, not one to be avoided."""
    labels = settings.labels
    if avoided:
        labels = {**labels, NODE_ID: f"!in({','.join(avoided)})"}
    return placement_group(
        [settings.bundle],
        strategy="STRICT_PACK",
        name=f"seer-{name}-{secrets.token_hex(4)}",
        bundle_label_selector=[labels] if labels else None,
    )


def node_of(group: PlacementGroup) -> str:
    """Return the id of the node on which a place is."""
    table: dict[str, Any] = placement_group_table(group)
    return str(table["bundles_to_node_id"][0])


def make_nurse(group: PlacementGroup, settings: Settings) -> Any:
    """Return the handle of a nurse in a place."""
    options = {
        "num_cpus": 0,
        "num_gpus": settings.gpus,
        "max_restarts": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
    }
    return ray.remote(Nurse).options(**options).remote()


def release(group: PlacementGroup) -> None:
    """Give a place back, which ends its nurse, and with it the worker; one that is gone is no error."""
    with suppress(Exception):
        remove_placement_group(group)


def shortage(settings: Settings) -> str:
    """Return which resources are missing for one instance: wanted, free and there in the whole cluster."""
    free, there = ray.available_resources(), ray.cluster_resources()
    missing = [
        f"{wanted:g} {name} wanted, {free.get(name, 0.0):g} of {there.get(name, 0.0):g} free"
        for name, wanted in settings.bundle.items()
        if free.get(name, 0.0) < wanted
    ]
    return "; ".join(missing) or f"no single node has {_listed(settings.bundle)} free"


def lacking(settings: Settings, avoided: Collection[str] = ()) -> str | None:
    """Return why no node but those to be avoided could ever have an instance, or None if one could."""
    nodes = [node for node in _nodes() if node["NodeID"] not in avoided]
    labelled = [node for node in nodes if _has_labels(node, settings.labels)]
    if not labelled:
        labels = ", ".join(f"{name}={value}" for name, value in settings.labels.items())
        return f"none of the {len(nodes)} nodes has the labels {labels}"
    totals = [node["Resources"] for node in labelled]
    if any(
        all(total.get(name, 0.0) >= wanted for name, wanted in settings.bundle.items()) for total in totals
    ):
        return None
    most = {name: max(total.get(name, 0.0) for total in totals) for name in settings.bundle}
    return (
        f"none of the {len(labelled)} nodes has {_listed(settings.bundle)}; the most that one has is"
        f" {_listed(most)}"
    )


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _has_labels(node: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a node has these labels; selectors with operators are left to Ray."""
    own = node.get("Labels", {})
    return all(own.get(name) == value for name, value in labels.items() if value[:1] not in ("!", "i"))


def _listed(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{value:g} {name}" for name, value in resources.items())
