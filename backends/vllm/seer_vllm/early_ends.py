"""Chunks that end where KV runs short, with the tokens that they have, in place of being preempted."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from seer_vllm.connector import StoreConnector

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request, RequestStatus

__all__ = ["EarlyEnds"]


class EarlyEnds:
    """Ends requests of one of vLLM's schedulers under a status, and reports that after the step."""

    def __init__(self, status: RequestStatus) -> None:
        self._status = status
        self._ended: list[tuple[Request, dict[str, Any] | None]] = []

    def end(self, scheduler: Scheduler, request: Request) -> None:
        """End a request that a step being planned has no room for; its KV goes to the pool."""
        request.status = self._status
        connector = scheduler.connector
        with connector.planning() if isinstance(connector, StoreConnector) else nullcontext():
            parameters, _ = scheduler._free_request(request)
        self._ended.append((request, parameters))

    def report(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Add the ends to the outputs of a step."""
        for request, parameters in self._ended:
            answers = outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs
            answers.append(
                EngineCoreOutput(
                    request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    kv_transfer_params=parameters,
                )
            )
        self._ended.clear()
