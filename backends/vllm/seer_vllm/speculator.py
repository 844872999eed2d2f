"""Drafts of a ``DraftSource`` in vLLM's second model runner.

vLLM 0.32 refuses a proposer of one's own there.  So an engine is made with the n-gram speculator
(``CARRIER``), which has no model and keeps all tokens on the device, and ``install`` replaces it before the
first request.  It relies on these facts, without async scheduling:

- after each step ``propose(input_batch, ...)`` returns the draft tokens of the batch's requests, in its
  order, int64 [requests, draft tokens], on the device; ``num_sampled`` says how many tokens each of them got
  in the step, 0 in the middle of its prefill.  A dummy run means nothing;
- ``req_states.all_token_ids.gpu[slot]`` and ``total_len.gpu[slot]`` have a request's tokens by then, those of
  the step included;
- ``take_draft_token_ids()`` returns to the scheduler how many drafts each request gets, and which.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from seer_worker.sampling.sending import sent
from torch import Tensor

from seer_vllm.proposer import Proposer

__all__ = ["Speculator", "install"]


class Speculator:
    """Asks a ``Proposer``; stands in for vLLM's ``BaseSpeculator``."""

    num_query_per_req = 1
    num_extra_query_per_req = 0
    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, runner: Any, proposer: Proposer) -> None:
        self._requests = runner.req_states
        self._draft_tokens: int = runner.num_speculative_steps
        self._proposer = proposer
        self._request_ids: list[str] = []
        self._drafts: list[list[int]] = []
        proposer.batch_ids = lambda: self._request_ids

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: Tensor,
        *_: Any,
        dummy_run: bool = False,
        **__: Any,
    ) -> Tensor:
        """Return drafts for the next step, int64 [requests, draft tokens], with zeros behind short ones."""
        width = self._draft_tokens
        device = num_sampled.device
        if dummy_run:
            return torch.zeros(input_batch.num_reqs, width, dtype=torch.int64, device=device)
        slots, texts = input_batch.idx_mapping.long(), self._requests.all_token_ids.gpu
        lengths = self._requests.total_len.gpu[slots]
        # The last tokens of each request, as many as one step can give: all comes to the host in one copy.
        places = (lengths[:, None] - width - 1 + torch.arange(width + 1, device=device)).clamp(min=0)
        columns = (lengths[:, None], num_sampled[:, None], texts[slots[:, None], places])
        rows = torch.cat([column.to(torch.int32) for column in columns], dim=1).cpu().numpy()
        sampled = [row[len(row) - count :].tolist() for row, count in zip(rows, rows[:, 1], strict=True)]
        self._request_ids = list(input_batch.req_ids)
        self._drafts = self._proposer.propose_for(
            sampled, rows[:, 0], lambda row, start, stop: texts[slots[row], start:stop].tolist()
        )
        padded = [[*draft, *[0] * (width - len(draft))] for draft in self._drafts]
        return sent(np.array(padded, dtype=np.int64), device)

    def take_drafts(self) -> Any:
        """Return vLLM's ``DraftTokenIds`` for the scheduler."""
        from vllm.v1.outputs import DraftTokenIds

        return DraftTokenIds(self._request_ids, self._drafts)


def install(runner: Any, kind: type[Proposer] = Proposer) -> Proposer:
    """Let a ``Proposer`` draft for ``runner``; ``internals.check_second_runner`` has found nothing against
    it.
    """
    proposer = kind(runner.vllm_config)
    speculator = Speculator(runner, proposer)
    runner.speculator = speculator
    runner.take_draft_token_ids = speculator.take_drafts
    return proposer
