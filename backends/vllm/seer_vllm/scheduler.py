"""vLLM's scheduler, with an account of the work behind each request, and chunks that end early.

vLLM counts preemptions and drafts per engine, and computed tokens not at all.  Named in ``scheduler_cls``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from seer_worker.process.account import RequestStats
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from seer_vllm.connector import StoreConnector
from seer_vllm.draft_lengths import PADDING, length_of
from seer_vllm.early_ends import EarlyEnds

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from seer_vllm.routing import RequestExperts

__all__ = ["AccountingScheduler", "AsyncAccountingScheduler", "RequestAccount"]


@attrs.define(eq=False)
class RequestAccount(RequestStats):
    """The account of one of vLLM's requests."""

    request: Request = attrs.field(kw_only=True)
    experts: list[NDArray[np.integer[Any]]] = attrs.field(factory=list, kw_only=True)
    """The experts of its positions so far, int [positions, layers, experts per token] each."""


class AccountingScheduler(Scheduler):
    """Keeps an account of every request until ``settle`` is called for it.

    Where KV runs short, a request that ``may_end_early`` and has a token ends with what it has; others are
    preempted.  Drafts that need one length (``draft_lengths``) are padded here, between what drafts and what
    verifies, for both model runners; the padding counts as drafted.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._accounts: dict[str, RequestAccount] = {}
        self._early = EarlyEnds(RequestStatus.FINISHED_LENGTH_CAPPED)
        self.scheduled: tuple[int, int] = (0, 0)
        """Requests and positions of the last step planned."""
        self.draft_lengths: tuple[int, ...] = ()
        """The lengths of which all drafts of a step have one; without any, each has its own."""
        self.experts: RequestExperts | None = None
        """What takes the experts of requests, where they are wanted."""
        self.drafted_steps = self.uniform_steps = 0
        """Steps with drafts, and those among them whose requests had the same number of positions."""
        if self.num_spec_tokens:
            # A draft length by batch size, constant here, keeps vLLM from padding a new request with drafts
            # that mean nothing, which would be verified, and may reach past its chunk's end.
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)

    def add_request(self, request: Request) -> None:
        """Queue a request and open its account."""
        super().add_request(request)
        self._accounts[request.request_id] = RequestAccount(request=request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Plan one step and book its positions."""
        output = super().schedule(throttle_prefills)
        for request_id, tokens in output.num_scheduled_tokens.items():
            self._accounts[request_id].computed_tokens += tokens
        for new in output.scheduled_new_reqs:
            account = self._accounts[new.req_id]
            stats = account.request.prefill_stats
            if stats is not None:  # the second model runner gets preempted requests as new ones, without
                account.pool_tokens = stats.num_external_cached_tokens
        self.scheduled = len(output.num_scheduled_tokens), output.total_num_scheduled_tokens
        if output.scheduled_spec_decode_tokens:
            self.drafted_steps += 1
            self.uniform_steps += len(set(output.num_scheduled_tokens.values())) == 1
        return output

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take the drafts for the next step, padded to one length if they have to have one."""
        super().update_draft_token_ids(draft_token_ids)
        if not self.draft_lengths:
            return
        found = [self.requests.get(each) for each in draft_token_ids.req_ids]
        requests = [each for each in found if each and not each.is_finished() and not each.is_prefill_chunk]
        longest = max((len(each.spec_token_ids) for each in requests), default=0)
        length = length_of(longest, self.draft_lengths)
        for each in requests:
            each.spec_token_ids = [*each.spec_token_ids, *[PADDING] * (length - len(each.spec_token_ids))]

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """End a request early, if it may and has a token, or preempt it; its KV goes to the pool."""
        params = request.sampling_params
        extra = (params.extra_args if params else None) or {}
        if extra.get("may_end_early") and request.num_output_tokens:
            self._early.end(self, request)
            return
        if isinstance(self.connector, StoreConnector):
            self.connector.request_preempted(request)
        self._keep_experts(request)
        super()._preempt_request(request, *args, **kwargs)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Free a request that is over; its experts stay until it is settled."""
        self._keep_experts(request)
        return super()._free_request(request, *args, **kwargs)

    def _keep_experts(self, request: Request) -> None:
        if self.experts is not None:
            self.experts.keep(request, self._accounts[request.request_id].experts)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take in a step's tokens and book what became of its drafts."""
        drafted = [
            (account, drafts, account.request.num_output_tokens)
            for request_id, drafts in scheduler_output.scheduled_spec_decode_tokens.items()
            if (account := self._accounts.get(request_id)) is not None
        ]
        logprobs = model_runner_output.logprobs
        if isinstance(self.connector, StoreConnector) and logprobs is not None:
            self.connector.saves = bool(np.isfinite(logprobs.logprobs[:, 0]).all())
        if isinstance(self.connector, StoreConnector):
            self.connector.put_staged()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for account, drafts, before in drafted:
            request = account.request
            kept = request.num_output_tokens - before
            if kept:
                account.verified(drafts, kept, request.output_token_ids[-1])
        self._early.report(outputs)
        return outputs

    def settle(self, request_id: str) -> RequestAccount:
        """Close the account of a finished or aborted request and return it."""
        return self._accounts.pop(request_id)


class AsyncAccountingScheduler(AccountingScheduler, AsyncScheduler):
    """Plans a step while the last one computes; a request that stops may have been in one more by then."""
