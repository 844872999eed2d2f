"""SGLang's scheduler, driven by the worker's own loop.

SGLang runs it in a process of its own, which takes requests from one socket and sends tokens to another, step
by step; its HTTP server and its ``InstanceClient`` class both stand at the other ends.  Here it has no
sockets: requests are put into its queue, and those that have ended are handed over as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.server_args import PortArgs

from seer_sglang.cache import PooledPrefillAdder

__all__ = ["InlineScheduler"]


class TokenSocket:
    """Stands where SGLang has a socket to the process that turns tokens into text."""

    def __init__(self) -> None:
        self.requests: list[Req] = []


class Collector(SchedulerOutputStreamer):
    """Keeps the requests that have ended instead of sending tokens of all."""

    __slots__ = ()

    def stream_output(self, reqs: list[Req], return_logprob: bool, skip_req: Req | None = None) -> None:
        """Keep those of a step that have ended in it."""
        for req in reqs:
            if req is not skip_req and req.finished() and not req.finished_output:
                req.finished_output = True
                self.send_to_detokenizer.requests.append(req)


class InlineScheduler(Scheduler):
    """A scheduler of one device, without sockets.

    Where KV runs short, a request for which ``may_end_early`` is true ends with what it has; others are put
    back into the queue.
    """

    may_end_early: Callable[[Req], bool] = staticmethod(lambda req: False)

    def init_ipc_channels(self, port_args: PortArgs) -> None:
        """Open no socket."""
        no_socket = SenderWrapper(None)
        self._ended = TokenSocket()
        self.ipc_channels = SchedulerIpcChannels(
            recv_from_tokenizer=None,
            recv_from_rpc=None,
            send_to_tokenizer=no_socket,
            send_to_detokenizer=self._ended,
            send_metrics_from_scheduler=None,
        )
        self.load_snapshot_writer = None
        self.recv_from_tokenizer = None

    def get_output_streamer_class(self) -> type[SchedulerOutputStreamer]:
        """Name what keeps ended requests."""
        return Collector

    def get_prefill_adder_class(self) -> type[PooledPrefillAdder]:
        """Name what chooses the requests of a prefill."""
        return PooledPrefillAdder

    def send_abort_output(self, abort_req: Any, req: Req) -> None:
        """Keep a request that SGLang gives up outside of a step's results."""
        self._ended.requests.append(req)

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        """Queue a request, unless it has just left its KV and may end early; that was no preemption then."""
        if is_retracted and self.may_end_early(req):
            req.retraction_count -= 1
            req.finished_reason = FINISH_LENGTH(length=len(req.output_ids))
            self._ended.requests.append(req)
        else:
            super()._add_request_to_queue(req, is_retracted)

    def add(self, req: Req) -> None:
        """Queue a request."""
        self._add_request_to_queue(req)

    def plan(self) -> ScheduleBatch | None:
        """Return what the next step computes; None if there is nothing to do."""
        plan = self.get_next_batch_to_run(self.running_batch, self.last_batch)
        self.running_batch: ScheduleBatch = plan.running_batch
        return plan.batch_to_run

    def compute(self, batch: ScheduleBatch | None, computed: Callable[[], None]) -> list[Req]:
        """Make the step that has been planned; return the requests that it ended, or that were given up.

        ``computed()`` is called when its tokens are there, and no request has ended with them yet.
        """
        if batch is not None:
            result = self.run_batch(batch)
            computed()
            self.process_batch_result(batch, result)
        self.last_batch = batch
        ended, self._ended.requests = self._ended.requests, []
        return ended
