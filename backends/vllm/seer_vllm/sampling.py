"""Keyed sampling (``seer_worker.sampling.keyed``) in vLLM's model runner.

``install`` puts ``VllmSampler.sample`` in place of ``GPUModelRunner._sample`` and relies on vLLM 0.32's
first model runner (``VLLM_USE_V2_MODEL_RUNNER=0``) without async scheduling:

- ``_sample(logits, spec_decode_metadata)`` returns a ``SamplerOutput``: int32 tokens [requests, most], -1
  after a row's last, and log-probs of as many rows;
- request i has ``num_draft_tokens[i] + 1`` rows of logits (without speculation one), in the batch's order;
- ``input_batch.num_tokens_no_spec[i]`` counts prompt and output tokens, also after a preemption.  It is
  advanced after sampling.  A row in the middle of its prefill is sampled too, and thrown away.

``internals.check_runner`` checks what can be checked of this.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from seer_worker.sampling.keyed import PLACEHOLDER, keyed_choices, noise_steps, rows_at_once, verify
from seer_worker.sampling.sampler import LogitRecorder
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

__all__ = ["VllmSampler", "install"]


class VllmSampler:
    """Samples for a model runner; stands in for ``GPUModelRunner._sample``."""

    def __init__(self, runner: Any, last: Iterable[int] = ()) -> None:
        self._runner = runner
        self._last = np.array(sorted(last), dtype=np.int64)
        self._request_ids: list[str] = []
        self._seeds = torch.empty(0, dtype=torch.int64)
        self._steps = torch.empty(0, dtype=torch.int64)
        self.watch = LogitRecorder()

    def sample(self, logits: Tensor, drafts: Any) -> Any:
        """Return vLLM's ``SamplerOutput`` for a step with or without drafts (``SpecDecodeMetadata``)."""
        from vllm.v1.outputs import SamplerOutput

        metadata = self._runner.input_batch.sampling_metadata
        if metadata.max_num_logprobs:
            raise ValueError(f"log-probabilities of {metadata.max_num_logprobs} alternatives are not kept")
        logits = logits.to(torch.float32)
        requests = len(self._runner.input_batch.req_ids)
        counts = [0] * requests if drafts is None else drafts.num_draft_tokens
        if len(logits) != requests + sum(counts):
            raise RuntimeError(
                f"{len(logits)} rows of logits for {requests} requests and {sum(counts)} drafts"
            )
        if len(logits) == requests:
            tokens, places, rows = (
                self._choose(logits, None, self._positions(logits.device))[:, None],
                None,
                None,
            )
        else:
            tokens, places, rows = self._verify(logits, drafts)
        logprobs = None
        if metadata.max_num_logprobs is not None:
            logprobs = _gather_logprobs(logits, tokens, places, rows)
        return SamplerOutput(sampled_token_ids=tokens.to(torch.int32), logprobs_tensors=logprobs)

    def _verify(self, logits: Tensor, drafts: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, where among them (flattened) there are some, and the row of logits behind each."""
        device = logits.device
        counts = np.array(drafts.num_draft_tokens, dtype=np.int64)
        first = np.cumsum(counts + 1) - counts - 1
        owner = np.repeat(np.arange(len(counts)), counts + 1)
        positions = self._positions(torch.device("cpu")).numpy()[owner] + np.arange(len(owner)) - first[owner]

        def choose(rows: Ints) -> Ints:
            part = logits if len(rows) == len(logits) else logits[torch.from_numpy(rows).to(device)]
            requests, places = (torch.from_numpy(values[rows]).to(device) for values in (owner, positions))
            return self._choose(part, requests, places).cpu().numpy()

        draft_tokens = drafts.draft_token_ids.cpu().numpy()
        tokens = verify(choose, counts, draft_tokens, self._last, rows_at_once(logits))
        there = tokens != PLACEHOLDER
        rows = (first[:, None] + np.arange(tokens.shape[1]))[there]
        arrays = (tokens, np.flatnonzero(there), rows)
        tokens_there, places, rows_there = (torch.from_numpy(array).to(device) for array in arrays)
        return tokens_there, places, rows_there

    def _choose(self, logits: Tensor, requests: Tensor | None, positions: Tensor) -> Tensor:
        """Return the token of each row; row r is of request ``requests[r]``, or of request r."""
        metadata = self._runner.input_batch.sampling_metadata
        if self.watch.on:
            seeds = self._seeds_on(logits.device)
            self.watch.see(logits, seeds if requests is None else seeds[requests], positions)
        if metadata.all_greedy:
            return logits.argmax(dim=-1)
        vocab = logits.shape[1]
        if len(self._steps) != vocab or self._steps.device != logits.device:
            self._steps = noise_steps(vocab, logits.device)
        seeds = self._seeds_on(logits.device)
        temperature, top_k, top_p = metadata.temperature, metadata.top_k, metadata.top_p
        if requests is not None:
            seeds = seeds[requests]
            temperature, top_k, top_p = (
                None if values is None else values[requests] for values in (temperature, top_k, top_p)
            )
        return keyed_choices(logits, temperature, top_k, top_p, seeds, positions, self._steps)

    def _seeds_on(self, device: torch.device) -> Tensor:
        """Return the requests' seeds, kept while the batch stays."""
        batch = self._runner.input_batch
        if batch.req_ids != self._request_ids:
            self._request_ids = list(batch.req_ids)
            requests = self._runner.requests
            seeds = [requests[id].sampling_params.extra_args["seed"] for id in self._request_ids]
            self._seeds = torch.tensor(seeds, dtype=torch.int64, device=device)
        return self._seeds

    def _positions(self, device: torch.device) -> Tensor:
        """Return the position of each request's next token."""
        batch = self._runner.input_batch
        counts = batch.num_tokens_no_spec[: len(batch.req_ids)]
        return torch.from_numpy(counts.astype(np.int64)).to(device)


def _gather_logprobs(logits: Tensor, tokens: Tensor, places: Tensor | None, rows: Tensor | None) -> Any:
    """Return the tokens' raw log-probabilities as vLLM's ``LogprobsTensors``, one row for each, rank 0.

    vLLM's own would rank the token too, in a function compiled by inductor: three seconds of a first step,
    and a C++ compiler at run time.
    """
    from vllm.v1.outputs import LogprobsTensors

    flat = tokens.flatten()[:, None]
    if places is None or rows is None:
        logprobs = logits.log_softmax(dim=-1).gather(1, flat)
    else:
        logprobs = torch.zeros(flat.shape, dtype=torch.float32, device=logits.device)
        logprobs[places] = logits[rows].log_softmax(dim=-1).gather(1, flat[places])
    return LogprobsTensors(flat.to(torch.int32), logprobs, torch.zeros_like(flat[:, 0]))


class NoDrafts:
    """Stands in for ``SpecDecodeMetadata`` in a step without drafts, which needs hardly any of it."""

    def __init__(self, ends: Tensor) -> None:
        self.logits_indices = ends
        self.num_draft_tokens = [0] * len(ends)


def install_shortcut(runner: Any) -> None:
    """Spare steps without drafts the preparation of their verification."""
    prepare, device = runner._calc_spec_decode_metadata, runner.device

    def prepare_drafts(num_draft_tokens: Any, cu_num_tokens: Any) -> Any:
        if num_draft_tokens.any():
            return prepare(num_draft_tokens, cu_num_tokens)
        return NoDrafts(torch.from_numpy(cu_num_tokens - 1).to(device))

    runner._calc_spec_decode_metadata = prepare_drafts


def install(runner: Any) -> VllmSampler:
    """Make ``runner`` sample by key; ``internals.check_runner`` has found nothing against it."""
    if runner.speculative_config is not None:
        install_shortcut(runner)
    sampler = VllmSampler(runner, _end_tokens(runner.model_config))
    runner._sample = sampler.sample
    return sampler


def _end_tokens(model_config: Any) -> set[int]:
    """Return the tokens with which the model ends a response."""
    found = [
        getattr(model_config.hf_text_config, "eos_token_id", None),
        model_config.try_get_generation_config().get("eos_token_id"),
    ]
    return {id for ids in found if ids is not None for id in (ids if isinstance(ids, list) else [ids])}
