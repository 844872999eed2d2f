"""A worker's life: the start message, the engine, and what is sent when it ends."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
from msgspec import structs
from seer_host.frames import WireError
from seer_host.scratch import name_shared_memory

from seer_core.errors import ConfigError, EngineError
from seer_core.model import InstanceInfo
from seer_core.ports.kv import StoreSpec
from seer_worker.process.adapter import ADAPTER, EngineAdapter
from seer_worker.process.compiled import keep_compiled_private
from seer_worker.process.dead_ranks import send_reason_by
from seer_worker.process.drafts import check_source
from seer_worker.process.place import node_name, own_address
from seer_worker.process.place_checks import check_place
from seer_worker.process.worker import Worker
from seer_worker.tokenizer.library import read
from seer_worker.wire import (
    Degraded,
    Link,
    ReadTokenizer,
    Ready,
    RuntimeGoneError,
    Start,
    TokenizerRead,
)

__all__ = ["work"]

log = structlog.get_logger("seer")

TRACEBACK_LINES = 12


def work(connection: socket.socket, before_close: Callable[[], object] = lambda: None) -> int:
    """Serve the runtime at the other end; return the exit status.

    ``before_close`` is called once there is nothing left to do but to close the engine.
    """
    link = Link(connection)
    send_reason_by(link.send_last)
    adapter: EngineAdapter | None = None
    worker: Worker | None = None
    try:
        start, *early = link.receive(wait=True)
        if isinstance(start, ReadTokenizer) and not early:
            reading = read(Path(start.model_dir), start.trust_remote_code, start.textual)
            link.send(TokenizerRead(reading))
            return 0
        if not isinstance(start, Start) or early:
            raise WireError("the first message must be Start, alone")
        check_place(start)
        name_shared_memory(Path(start.scratch))
        keep_compiled_private()
        if start.source is not None:
            check_source(start.source, start.own_methods)  # the engine's import takes seconds
        make: Any = ADAPTER.load(start.instance)
        start = structs.replace(start, address=own_address(connection))
        adapter = make(start)
        worker = Worker(link.send, adapter, start)
        info = worker.info
        if not getattr(adapter, "emulated", False):
            from seer_worker.process import selftest  # imports torch, which takes seconds

            selftest.check_keyed(worker)
            if apart := selftest.continued_apart(worker):
                log.info("continues_otherwise", apart=apart)
                info = structs.replace(info, exactness="reproducible")
                if (reason := selftest.wrong_continuation(apart)) is not None:
                    link.send(Degraded("continuation", reason))
        link.send(*worker.notes(), Ready(_placed(info, start.store), worker.measured))
        worker.serve(link)
    except RuntimeGoneError:
        return 0
    except (ConfigError, EngineError, WireError) as error:
        link.send_last(str(error))
        return 1
    except Exception:
        tail = traceback.format_exc().splitlines()[-TRACEBACK_LINES:]
        log.exception("worker_failed")
        link.send_last("\n".join(tail))
        return 1
    finally:
        before_close()
        closing = worker or adapter
        if closing is not None:
            closing.close()
    return 0


def _placed(info: InstanceInfo, store: StoreSpec | None) -> InstanceInfo:
    """Return the info with the node that this process runs on, and how far its KV reaches."""
    node = node_name()
    confined = store is not None and not store.spans_nodes
    return structs.replace(info, node=node, kv_reach=node if confined else "")
