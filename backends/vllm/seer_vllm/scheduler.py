"""vLLM's scheduler, with an account of the work behind each request.

vLLM counts preemptions per engine and computed tokens not at all.  Named in ``scheduler_cls``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

__all__ = ["AccountingScheduler", "Work"]


class Work(NamedTuple):
    """Positions run through the model for a request, and how often it was preempted."""

    computed_tokens: int
    preemptions: int


class AccountingScheduler(Scheduler):
    """Counts every scheduled position of every request until ``settle`` is called for it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._open: dict[str, Request] = {}
        self._computed_tokens: dict[str, int] = {}

    def add_request(self, request: Request) -> None:
        """Queue a request and open its account."""
        super().add_request(request)
        self._open[request.request_id] = request
        self._computed_tokens[request.request_id] = 0

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Plan one step and book its positions."""
        output = super().schedule(throttle_prefills)
        for request_id, tokens in output.num_scheduled_tokens.items():
            self._computed_tokens[request_id] += tokens
        return output

    def settle(self, request_id: str) -> Work:
        """Close the account of a finished or aborted request and return it."""
        request = self._open.pop(request_id)
        return Work(self._computed_tokens.pop(request_id), request.num_preemptions)
