"""The process of one instance: ``python -P -m seer_vllm.worker FD PARENT_PID``.

A plain loop around vLLM's synchronous engine, whose core runs in this very process: take every message
that has arrived, make one step, send what has finished.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from seer_core.errors import EngineError
from seer_core.process import die_with
from seer_vllm.proposer import speculative_config
from seer_vllm.wire import (
    Abort,
    Called,
    Fatal,
    ForgetGroup,
    Frames,
    FromWorker,
    MeasureSteps,
    Ready,
    ResetCache,
    Shutdown,
    Start,
    Submit,
    ToWorker,
    UpdateWeights,
    WireError,
    encode,
)

if TYPE_CHECKING:
    from seer_vllm.instance import Instance

__all__ = ["Link", "main", "serve"]

EXIT_GRACE_S = 10
TRACEBACK_LINES = 12


class Link:
    """The worker's end of the socket, blocking."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._frames: Frames[ToWorker] = Frames(ToWorker)

    def send(self, *messages: FromWorker) -> None:
        """Send messages, in order."""
        if messages:
            self._socket.sendall(b"".join(map(encode, messages)))

    def receive(self, *, wait: bool) -> list[ToWorker]:
        """Return every message that has arrived; with ``wait``, at least some bytes' worth.

        Raises:
            EOFError: the runtime is gone.
        """
        messages: list[ToWorker] = []
        while wait or select.select([self._socket], [], [], 0)[0]:
            data = self._socket.recv(1 << 20)
            if not data:
                raise EOFError("the runtime closed the connection")
            messages += self._frames.feed(data)
            wait = False
        return messages


def serve(link: Link, instance: Instance, report_interval_s: float) -> None:
    """Work until the runtime says ``Shutdown``."""
    next_report = 0.0
    while True:
        for message in link.receive(wait=not instance.busy):
            match message:
                case Submit(job):
                    refusal = instance.submit(job)
                    if refusal is not None:
                        link.send(refusal)
                case Abort(job_id):
                    instance.abort(job_id)
                case ForgetGroup(group_id):
                    instance.forget_group(group_id)
                case ResetCache():
                    link.send(Called(instance.reset_cache()))
                case UpdateWeights(source, version):
                    link.send(instance.update_weights(source, version))
                case MeasureSteps(batch, draft_tokens, context_tokens):
                    link.send(instance.measure_steps(batch, draft_tokens, context_tokens))
                case Shutdown():
                    return
                case Start():
                    raise ValueError("started twice")
        if not instance.busy:
            continue
        results = instance.step()
        report = not instance.busy or monotonic() >= next_report
        load = [instance.load()] if report else []
        # Troubles first: the rollout may be over, and summed up, with the last result.
        troubles = instance.troubles() if results or report else []
        link.send(*troubles, *results, *load)
        if report:
            next_report = monotonic() + report_interval_s


def main(fd: int, parent_pid: int) -> int:
    """Serve the runtime at the other end of ``fd``; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent_pid)
    link = Link(socket.socket(fileno=fd))
    instance = None
    try:
        start, *early = link.receive(wait=True)
        if not isinstance(start, Start) or early:
            raise ValueError("the first message must be Start, alone")
        if start.source is not None:
            speculative_config(start.source)  # complains before vLLM is imported, which takes seconds
        from seer_vllm import patches
        from seer_vllm.instance import Instance

        patches.install(Path(start.scratch))
        instance = Instance(start)
        link.send(*instance.troubles(), Ready(instance.info))
        serve(link, instance, start.report_interval_s)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0
    except (EngineError, WireError) as error:
        link.send(Fatal(str(error)))
        return 1
    except Exception:
        tail = traceback.format_exc().splitlines()[-TRACEBACK_LINES:]
        traceback.print_exc()
        link.send(Fatal("\n".join(tail)))
        return 1
    finally:
        signal.alarm(EXIT_GRACE_S)
        if instance is not None:
            instance.close()
    return 0


if __name__ == "__main__":
    status = main(int(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(status)  # the interpreter would tear down torch and vLLM object by object, for seconds
