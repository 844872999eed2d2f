"""Keyed sampling (``seer_worker.sampling.keyed``) in vLLM's second model runner.

``install`` replaces two methods of the runner's ``Sampler``, and one of its ``RejectionSampler``.  It relies
on vLLM 0.32, whose async scheduling changes none of it, since steps come to the device in their order:

- ``add_request(req_idx, sampling_params)`` is called for each request that gets a slot, also after a
  preemption, before a step copies what ``sampling_states`` holds of the slots to the device;
- ``sample(logits, expanded_idx_mapping, ...)`` returns a token for each row of logits, int64 [rows], and
  the logits as the sampler has changed them.  Row r is of slot ``expanded_idx_mapping[r]``, and follows the
  token ``input_ids[r]`` at position ``pos[r]``, the ``expanded_local_pos[r]``-th draft behind settled ones;
- log-probs are computed from the logits as the model gives them (``logprobs_mode``, by default raw);
- ``req_states.all_token_ids.gpu[slot]`` has the tokens of a request, without the drafts of the step;
- a row in the middle of its prefill is sampled too, and thrown away;
- in a step with drafts ``RejectionSampler`` calls ``_verify`` instead, with all rows of some requests.
  Request i has the rows from ``cu_num_logits[i]`` on, one for each draft and one more.  The draft behind row
  r is ``verify_draft_sampled[r + 1]``, or -1 where it must not be accepted.

``internals.check_second_runner`` checks what can be checked of this.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from seer_worker.sampling.controls import Controlled, control
from seer_worker.sampling.fused import chosen_by_key
from seer_worker.sampling.grammars import grammars_of
from seer_worker.sampling.sampler import LogitRecorder
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from vllm import SamplingParams

__all__ = ["SecondRunnerSampler", "install"]


class SecondRunnerSampler:
    """Samples for a model runner; its methods stand in for those of vLLM's samplers."""

    def __init__(self, runner: Any) -> None:
        self._model = runner.model_config.model
        self._requests = runner.req_states
        self._draft_tokens: int = runner.num_speculative_steps
        self._states = runner.sampler.sampling_states
        self._add_request = runner.sampler.add_request
        self._controlled: dict[int, SamplingParams] = {}
        """Parameters of requests whose sampling changes logits, by slot."""
        self.watch = LogitRecorder()

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        """Give a slot to a request, with its seed."""
        self._add_request(req_idx, sampling_params)
        extra = sampling_params.extra_args
        assert extra is not None
        self._states.seeds.np[req_idx] = extra["seed"]
        if "temperature" in extra:  # vLLM has raised it
            self._states.temperature.np[req_idx] = extra["temperature"]
        self._controlled.pop(req_idx, None)
        if "sampling" in extra:
            self._controlled[req_idx] = sampling_params
            self._states.min_p.np[req_idx] = extra["sampling"].min_p

    def sample(
        self,
        logits: Tensor,
        expanded_idx_mapping: Tensor,
        idx_mapping: Tensor,
        idx_mapping_np: NDArray[np.intp],
        pos: Tensor,
        input_ids: Tensor,
        expanded_local_pos: Tensor,
        seq_lens_upper_bound_np: NDArray[np.int32],
        return_logprobs: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return the token of each row, int64 [rows], and the logits from which it was chosen."""
        states, slots, positions = self._states, expanded_idx_mapping.long(), pos.long() + 1
        seeds = states.seeds.gpu[slots]
        if self.watch.on:
            self.watch.see(logits, seeds, positions)
        if self._controlled and not self._controlled.keys().isdisjoint(idx_mapping_np.tolist()):
            logits = self._control(logits, slots, positions, input_ids, expanded_local_pos)
        if not states.temperature.np[idx_mapping_np].any():
            return logits.argmax(dim=-1), logits
        cuts_k = (states.top_k.np[idx_mapping_np] != states.vocab_size).any()
        cuts_p = (states.top_p.np[idx_mapping_np] != 1).any()
        least_p = states.min_p.np[idx_mapping_np].any()
        chosen, _ = chosen_by_key(
            logits,
            states.temperature.gpu[slots],
            states.top_k.gpu[slots] if cuts_k else None,
            states.top_p.gpu[slots] if cuts_p else None,
            seeds,
            positions,
            states.min_p.gpu[slots] if least_p else None,
        )
        return chosen, logits

    def verify(
        self,
        logits: Tensor,
        draft_logits: Tensor | None,
        draft_sampled: Tensor,
        pos: Tensor,
        cu_num_logits: Tensor,
        idx_mapping: Tensor,
        idx_mapping_np: NDArray[np.intp],
        expanded_idx_mapping: Tensor,
        expanded_local_pos: Tensor,
        seq_lens_upper_bound_np: NDArray[np.int32],
        verify_draft_sampled: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Accept drafts as far as they are the tokens of their rows.

        Returns:
            The logits that tokens were chosen from, each request's tokens, int64 [requests, drafts at most
            + 1], and how many of these count, int32 [requests].
        """
        chosen, logits = self.sample(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        first, rows = cu_num_logits[:-1].long()[:, None], cu_num_logits.diff().long()[:, None]
        columns = torch.arange(self._draft_tokens + 1, device=chosen.device)
        last = len(chosen) - 1
        places = (first + columns).clamp(max=last)
        tokens = torch.where(columns < rows, chosen[places], 0)
        right = (verify_draft_sampled[(places + 1).clamp(max=last)] == tokens) & (columns < rows - 1)
        kept = right.to(torch.int32).cumprod(dim=1).sum(dim=1).to(torch.int32) + 1
        return logits, tokens, kept

    def _control(
        self, logits: Tensor, slots: Tensor, positions: Tensor, input_ids: Tensor, drafted: Tensor
    ) -> Tensor:
        """Return logits as the sampling of each row's request has them."""
        texts = self._requests.all_token_ids.gpu
        rows = []
        for row, (slot, position, drafts) in enumerate(
            zip(slots.tolist(), positions.tolist(), drafted.tolist(), strict=True)
        ):
            params = self._controlled.get(slot)
            if params is not None:
                extra = params.extra_args or {}
                settled, behind = texts[slot, : position - drafts], input_ids[row + 1 - drafts : row + 1]
                text = torch.cat([settled, behind.to(settled.dtype)]).cpu().numpy()
                sampling, prompt_tokens, id = (
                    extra[each] for each in ("sampling", "context_tokens", "request")
                )
                rows.append(Controlled(row, sampling, prompt_tokens, text, params.all_stop_token_ids, id))
        return control(logits, rows, partial(grammars_of, self._model, logits.shape[1]))


def install(runner: Any, kind: type[SecondRunnerSampler] = SecondRunnerSampler) -> SecondRunnerSampler:
    """Make ``runner`` sample by key; ``internals.check_second_runner`` has found nothing against it."""
    sampler = kind(runner)
    runner.sampler.add_request = sampler.add_request
    runner.sampler.sample = sampler.sample
    if runner.rejection_sampler is not None:
        runner.rejection_sampler._verify = sampler.verify
    return sampler
