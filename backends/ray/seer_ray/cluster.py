"""The cluster: joined, or started, once per process, and its nodes.

All functions block; see ``threads``.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import ray
import structlog

from seer_core.error_origin import one_line
from seer_core.errors import EngineError
from seer_ray.settings import TABLE, Settings
from seer_ray.signal_handlers import kept_handler

__all__ = ["REMEDY", "SilentNodeError", "address", "draining", "free_resources", "join", "living_nodes"]

log = structlog.get_logger("seer")

_joining = threading.Lock()
REACH_S = 10.0
REMEDY = (
    "start one with `ray start`, of this version of Ray and Python and with this token, or correct"
    f" [{TABLE}].address"
)


class SilentNodeError(EngineError):
    """A node that has a place for an instance starts no actor there: it is dead, or dies in between.

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
            place = settings.named_address
            starts = not place
            try:
                _reach(place)
                _init(
                    address=settings.address or None,
                    log_to_driver=False,
                    logging_level="error",
                    **({"include_dashboard": False} if starts else {}),
                )
            except Exception as error:
                raise EngineError(
                    f"no Ray cluster at {place or 'this machine'}: {type(error).__name__}: {one_line(error)};"
                    f" {REMEDY}"
                ) from error
            nodes = len(living_nodes())
            log.info("ray_started" if starts else "ray_joined", nodes=nodes, ray=ray.__version__)
        return str(ray.util.get_node_ip_address())


def _reach(address: str) -> None:
    """Connect to the head's port, if an address has one: Ray itself goes on trying for minutes.

    Raises:
        OSError: nothing listens there.
    """
    host, _, port = address.rpartition(":")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()


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


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """Return the free resources of each node, by its id; Ray has no public function for it."""
    from ray._private.state import available_resources_per_node

    found: Mapping[str, Mapping[str, float]] = available_resources_per_node()
    return found


def living_nodes() -> list[dict[str, Any]]:
    """Return the nodes that Ray counts as alive, as ``ray.nodes`` has them."""
    return [node for node in ray.nodes() if node["Alive"]]
