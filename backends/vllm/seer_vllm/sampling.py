"""Keyed sampling (``seer_worker.sampling.keyed``) in vLLM's model runner.

``install`` puts ``VllmSampler.sample`` in place of ``GPUModelRunner._sample`` and relies on vLLM 0.32's
first model runner (``VLLM_USE_V2_MODEL_RUNNER=0``) without async scheduling:

- ``_sample(logits, spec_decode_metadata)`` returns a ``SamplerOutput``: int32 tokens [requests, most], -1
  after a row's last, and log-probs of as many rows;
- request i has a row of logits for each of its drafts and one more, in the batch's order;
- with speculation, ``_calc_spec_decode_metadata(num_draft_tokens, cu_num_scheduled_tokens)`` makes that
  metadata, of which a step reads ``logits_indices`` and hands all to ``_sample``.  The step's tokens, drafts
  included, are in ``input_ids.np`` by then;
- ``input_batch.num_tokens_no_spec[i]`` counts prompt and output tokens, also after a preemption.  It is
  advanced after sampling.  A row in the middle of its prefill is sampled too, and thrown away;
- ``input_batch.token_ids_cpu[i]`` has these tokens, and behind them the request's drafts of the step;
- ``sampler.gather_logprobs(logprobs, num_logprobs, token_ids)`` is called for the log-probs of prompts.

``internals.check_runner`` checks what can be checked of this.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from seer_worker.sampling.controls import Controlled, control
from seer_worker.sampling.fused import chosen_by_key
from seer_worker.sampling.grammars import grammars_of
from seer_worker.sampling.keyed import PLACEHOLDER, rows_at_once, verify
from seer_worker.sampling.sampler import LogitRecorder
from seer_worker.sampling.sending import sent
from torch import Tensor

from seer_core.model.arrays import LEAST_LOGPROB

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm import SamplingParams

    Ints = NDArray[np.int64]

__all__ = ["VllmSampler", "install"]

NO_ROWS: Ints = np.zeros(0, dtype=np.int64)


class VllmSampler:
    """Samples for a model runner; stands in for ``GPUModelRunner._sample``."""

    def __init__(self, runner: Any, last: Iterable[int] = ()) -> None:
        self._runner = runner
        self._last = np.array(sorted(last), dtype=np.int64)
        self._request_ids: list[str] = []
        self._seeds = torch.empty(0, dtype=torch.int64)
        self._controlled: dict[int, SamplingParams] = {}
        self._asking = np.zeros(0, dtype=np.bool_)
        self._min_p: Tensor | None = None
        self._low: tuple[Tensor, Tensor] | None = None
        """The requests whose temperature vLLM has raised, by their index, and the temperatures they ask for.
        """
        self.watch = LogitRecorder()

    def sample(self, logits: Tensor, drafts: StepDrafts | None) -> Any:
        """Return vLLM's ``SamplerOutput`` for a step with or without drafts."""
        from vllm.v1.outputs import SamplerOutput

        metadata = self._runner.input_batch.sampling_metadata
        requests = len(self._runner.input_batch.req_ids)
        drafted = 0 if drafts is None else len(drafts.token_ids)
        if len(logits) != requests + drafted:
            raise RuntimeError(f"{len(logits)} rows of logits for {requests} requests and {drafted} drafts")
        row_of = None
        if drafts is None or not drafted:
            positions = self._positions()
            chosen, own = self._choose(logits, Rows(None, positions, None, sent(positions, logits.device)))
            tokens, owner = chosen[:, None], np.arange(requests)
        elif logits.device.type == "cpu":
            tokens, row_of, rows = self._verify_in_rounds(logits, drafts)
            logits, owner, own = logits[torch.from_numpy(rows)], drafts.owner[rows], None
            chosen = tokens.flatten()[tokens.flatten() != PLACEHOLDER]
        else:
            tokens, row_of, chosen, own = self._verify(logits, drafts)
            owner = drafts.owner
        logprobs = None
        width = metadata.max_num_logprobs
        if width is not None:
            asking = np.flatnonzero(self._asking[owner]) if width else NO_ROWS
            every = None
            if own is None or len(asking):
                every = logits.to(torch.float32).log_softmax(-1)
                own = every.gather(1, chosen[:, None])[:, 0]
            logprobs = _logprobs_tensors(chosen, own, every, asking, width, row_of)
        return SamplerOutput(sampled_token_ids=tokens.to(torch.int32), logprobs_tensors=logprobs)

    def _verify(self, logits: Tensor, drafts: StepDrafts) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Sample all rows, and follow each request's drafts, without a wait for the device.

        Returns:
            The tokens, -1 after a request's last, of which row each of these places is, flattened, and the
            choice in every row.
        """
        positions = self._positions()[drafts.owner] + drafts.depth
        parts = drafts.owner, positions, drafts.behind, drafts.first, drafts.counts
        owners, places, behind, first, counts = sent(np.concatenate(parts), logits.device).split_with_sizes(
            [len(each) for each in parts]
        )
        chosen, own = self._choose(logits, Rows(drafts.owner, positions, owners, places))
        columns = torch.arange(int(drafts.counts.max()) + 1, device=logits.device)
        row_of = first[:, None] + torch.minimum(columns, counts[:, None])
        tokens = chosen[row_of]
        goes_on = (columns < counts[:, None]) & (behind[row_of] == tokens)
        for token in self._last.tolist():
            goes_on &= tokens != token
        there = torch.cat([torch.ones_like(goes_on[:, :1]), goes_on[:, :-1]], dim=1).cumprod(dim=1)
        return tokens.masked_fill(there == 0, PLACEHOLDER), row_of.flatten(), chosen, own

    def _verify_in_rounds(self, logits: Tensor, drafts: StepDrafts) -> tuple[Tensor, Tensor, Ints]:
        """Return the tokens, of which kept row each place is, and the kept rows.

        On a CPU, where nothing waits for the host, rows behind a mismatch need not be sampled.
        """
        first, owner = drafts.first, drafts.owner
        positions = self._positions()[owner] + drafts.depth

        def choose(rows: Ints) -> Ints:
            part = logits if len(rows) == len(logits) else logits[torch.from_numpy(rows)]
            columns = owner[rows], positions[rows]
            return self._choose(part, Rows(*columns, *map(torch.from_numpy, columns)))[0].numpy()

        sampled, kept = verify(choose, drafts.counts, drafts.token_ids, self._last, rows_at_once(logits))
        columns = np.arange(drafts.counts.max() + 1)
        there = columns < kept[:, None]
        rows = (first[:, None] + columns)[there]
        tokens = np.full(there.shape, PLACEHOLDER, dtype=np.int64)
        tokens[there] = sampled[rows]
        return torch.from_numpy(tokens), torch.from_numpy(np.cumsum(there) - 1), rows

    def _choose(self, logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Return each row's token, and its raw log-prob if the choice found it in passing."""
        metadata = self._runner.input_batch.sampling_metadata
        seeds = self._seeds_on(logits.device)
        if rows.owners is not None:
            seeds = seeds[rows.owners]
        if self.watch.on:
            self.watch.see(logits, seeds, rows.places)
        controlled = self._control(logits, rows)
        if metadata.all_greedy:
            return controlled.argmax(dim=-1), None

        def by_row(values: Any) -> Any:
            return values if values is None or rows.owners is None else values[rows.owners]

        temperatures = metadata.temperature
        if self._low is not None:
            temperatures = temperatures.index_put(self._low[:1], self._low[1])
        temperature, top_k, top_p, min_p = (
            by_row(each) for each in (temperatures, metadata.top_k, metadata.top_p, self._min_p)
        )
        chosen, logprobs = chosen_by_key(controlled, temperature, top_k, top_p, seeds, rows.places, min_p)
        return chosen, logprobs if controlled is logits else None

    def _control(self, logits: Tensor, rows: Rows) -> Tensor:
        """Return logits as the sampling of each row's request has them."""
        if not self._controlled:
            return logits
        owners = range(len(logits)) if rows.owner is None else rows.owner.tolist()
        texts = self._runner.input_batch.token_ids_cpu
        found = []
        for row, (request, position) in enumerate(zip(owners, rows.positions.tolist(), strict=True)):
            params = self._controlled.get(request)
            if params is not None:
                extra = params.extra_args or {}
                text, ends = texts[request, :position], params.all_stop_token_ids
                sampling, prompt_tokens, id = (
                    extra[each] for each in ("sampling", "context_tokens", "request")
                )
                found.append(Controlled(row, sampling, prompt_tokens, text, ends, id))
        return control(logits, found, partial(grammars_of, self._runner.model_config.model, logits.shape[1]))

    def _seeds_on(self, device: torch.device) -> Tensor:
        """Return the requests' seeds, kept while the batch stays."""
        batch = self._runner.input_batch
        if batch.req_ids != self._request_ids:
            self._request_ids = list(batch.req_ids)
            requests = self._runner.requests
            params = [requests[id].sampling_params for id in self._request_ids]
            seeds = [each.extra_args["seed"] for each in params]
            self._seeds = sent(np.array(seeds, dtype=np.int64), device)
            self._controlled = {
                place: each for place, each in enumerate(params) if "sampling" in each.extra_args
            }
            self._asking = np.array([bool(each.logprobs) for each in params])
            sampling = [each.extra_args.get("sampling") for each in params]
            min_p = [0.0 if each is None else each.min_p for each in sampling]
            self._min_p = sent(np.array(min_p, dtype=np.float32), device) if any(min_p) else None
            low = {
                place: each.extra_args["temperature"]
                for place, each in enumerate(params)
                if "temperature" in each.extra_args
            }
            self._low = None
            if low:
                places = sent(np.array([*low], dtype=np.int64), device)
                self._low = places, sent(np.array([*low.values()], dtype=np.float32), device)
        return self._seeds

    def _positions(self) -> Ints:
        """Return the position of each request's next token."""
        batch = self._runner.input_batch
        return batch.num_tokens_no_spec[: len(batch.req_ids)].astype(np.int64)  # type: ignore[no-any-return]


class Rows(NamedTuple):
    """The request of each row of logits, None if row r is of request r, and the position of its token.

    Both in main memory, int64 [rows], and again where the logits are.
    """

    owner: Ints | None
    positions: Ints
    owners: Tensor | None
    places: Tensor


def _logprobs_tensors(
    tokens: Tensor, own: Tensor, every: Tensor | None, asking: Ints, width: int, row_of: Tensor | None = None
) -> Any:
    """Return vLLM's ``LogprobsTensors`` [rows, 1 + width]; every rank is 0.

    vLLM's own way would rank the token too, in a function compiled by inductor: three seconds of a first
    step, and a C++ compiler at run time.

    Args:
        tokens: the token of each row.
        own: its log-prob.
        every: log-probs of all tokens in each row; needed where one asks for the most probable.
        asking: the rows whose requests ask for the most probable tokens too, by their index.
        width: the most that one asks for.
        row_of: which rows to return, where vLLM has more places than there are tokens.
    """
    from vllm.v1.outputs import LogprobsTensors

    ids, values = tokens[:, None], own[:, None]
    if width:
        ids, values = (torch.nn.functional.pad(each, (0, width)) for each in (ids, values))
    if width and every is not None:
        rows = sent(asking, own.device)
        top = every[rows].topk(width)
        ids[rows, 1:] = top.indices
        values[rows, 1:] = top.values.clamp(min=LEAST_LOGPROB)
    if row_of is not None:
        ids, values = ids[row_of], values[row_of]
    return LogprobsTensors(ids.to(torch.int32), values, torch.zeros_like(ids[:, 0]))


def gather_prompt_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
    """Stand in for vLLM's ``Sampler.gather_logprobs``, which here is called for prompts alone."""
    tokens = token_ids.long()
    own = logprobs.gather(1, tokens[:, None])[:, 0]
    found = _logprobs_tensors(tokens, own, logprobs, np.arange(len(tokens)), num_logprobs)
    found.logprobs.clamp_(min=LEAST_LOGPROB)
    return found


class StepDrafts:
    """The drafts of a step; stands in for vLLM's ``SpecDecodeMetadata``, most of which no one reads here.

    Args:
        counts: draft tokens per request, int64 [requests].
        ends: where each request's tokens end among ``token_ids``, integers [requests].
        token_ids: the step's tokens, those that were settled and after them the drafts, request by request.
        device: where logits are.
    """

    def __init__(self, counts: Ints, ends: Ints, token_ids: NDArray[np.int32], device: torch.device) -> None:
        rows = counts + 1
        stops = np.cumsum(rows)
        self.counts = counts
        self.first = stops - rows
        """The first row of logits of each request."""
        self.owner = np.repeat(np.arange(len(counts)), rows)
        """The request of each row."""
        row = np.arange(len(self.owner))
        self.depth = row - self.first[self.owner]
        """How many drafts of its request stand before each row."""
        places = (ends - stops)[self.owner] + row
        follows = self.depth > 0
        self.token_ids: Ints = token_ids[places[follows]].astype(np.int64)
        """All draft tokens, request by request."""
        self.behind = np.full(len(row), PLACEHOLDER, dtype=np.int64)
        """The draft behind each row; -1 for none."""
        self.behind[row[follows] - 1] = self.token_ids
        self.logits_indices = sent(places, device)
        """The places among the step's tokens whose logits are wanted."""


def install_drafts(runner: Any) -> None:
    """Prepare the verification of drafts from what is in main memory already, with one copy to the device."""

    def prepare_drafts(num_draft_tokens: Any, cu_num_scheduled_tokens: Any) -> StepDrafts:
        counts, ends = (each.astype(np.int64) for each in (num_draft_tokens, cu_num_scheduled_tokens))
        return StepDrafts(counts, ends, runner.input_ids.np, runner.device)

    runner._calc_spec_decode_metadata = prepare_drafts


def install(
    runner: Any, end_token_ids: Collection[int], kind: type[VllmSampler] = VllmSampler
) -> VllmSampler:
    """Make ``runner`` sample by key; ``internals.check_runner`` has found nothing against it."""
    if runner.speculative_config is not None:
        install_drafts(runner)
    sampler = kind(runner, end_token_ids)
    runner._sample = sampler.sample
    runner.sampler.gather_logprobs = gather_prompt_logprobs
    return sampler
