"""Drafts of a ``DraftSource`` in a stock ``vllm serve``, for the requests of Seer's runtime alone."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from seer_worker.process.drafts import Drafts, Ints, Text
from seer_worker.served import read_job

from seer_core.model import Sampling
from seer_core.ports.drafting import DraftContext, SiblingTokens, SourceSpec, StepTimes
from seer_core.ports.engine import ChunkJob
from seer_vllm.proposer import Proposer

if TYPE_CHECKING:
    from vllm import SamplingParams

__all__ = ["ServedProposer", "time_forward"]

MOST_EARLY = 4096
"""Texts that may come before the first chunk of their group."""

TRIES = 3
"""A pass is timed so often; the shortest counts."""


class ServedProposer(Proposer):
    """vLLM's ``custom_class``, which opens chunks as they come into the batch, and closes them when they go.

    Texts of siblings may come before the first chunk of their group; they are kept for it.
    """

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.find: Callable[[str], tuple[SamplingParams, list[int]]]
        """Returns a request's parameters and prompt."""
        self.runs: Callable[[str], bool]
        """Returns whether a request is still there."""
        self.request_ids = lambda: self._own
        self._own: list[str] = []
        self._rows: list[int] = []
        self._seen: list[str] = []
        self._early: list[SiblingTokens] = []
        self._groups: set[str] = set()

    def propose_for(
        self, sampled: list[list[int]], lengths: Ints, text: Text, most: int | None = None
    ) -> Drafts:
        """Return drafts for the next step, none for other clients' requests."""
        drafts: Drafts = [[] for _ in sampled]
        ids = list(self.batch_ids())
        if ids != self._seen:
            self._look(ids)
        rows = self._rows
        if rows:
            own = super().propose_for(
                [sampled[row] for row in rows],
                [int(lengths[row]) for row in rows],
                lambda b, start, stop: text(rows[b], start, stop),
                most,
            )
            for row, draft in zip(rows, own, strict=True):
                drafts[row] = draft
        return drafts

    def attach(self, spec: SourceSpec, host: DraftContext) -> None:
        """Make the source, in place of an earlier one's."""
        self.detach()
        super().attach(spec, host)

    def detach(self) -> None:
        """End the source, if there is one."""
        self.stop()
        self.source = None
        self.drafting.failed = False
        self.opened.clear()
        self._seen, self._own, self._rows = [], [], []
        self._early.clear()
        self._groups.clear()

    def add_sibling_tokens(self, text: SiblingTokens) -> None:
        """Pass a text on, now or when its group has a chunk here."""
        if text.group_id in self._groups:
            super().add_sibling_tokens(text)
        elif len(self._early) < MOST_EARLY:
            self._early.append(text)

    def forget(self, group_id: str) -> None:
        """Drop a group that is over."""
        self._sweep()
        self._groups.discard(group_id)
        self._early = [each for each in self._early if each.group_id != group_id]
        super().forget(group_id)

    def reset(self) -> None:
        """Drop everything, chunks that still run too: these go on without drafts."""
        self.close(*self.opened)
        self._seen, self._own, self._rows = [], [], []
        self._groups.clear()
        self._early.clear()
        super().reset()

    def _sweep(self) -> None:
        self.close(*[each for each in self.opened if not self.runs(each)])

    def _look(self, ids: list[str]) -> None:
        """Close what has left the batch for good, and open what is new."""
        self._sweep()
        new = set(ids) - set(self._seen)
        for id in ids:
            if id in new and id not in self.opened and self.source is not None:
                self._enter(id)
        self._seen = ids
        self._rows = [row for row, id in enumerate(ids) if id in self.opened]
        self._own = [ids[row] for row in self._rows]

    def _enter(self, id: str) -> None:
        params, prompt = self.find(id)
        job = read_job(params.extra_args)
        if job is None:
            return
        known = job.prompt_tokens if 0 < job.prompt_tokens <= len(prompt) else len(prompt)
        chunk = ChunkJob(
            id,
            job.response,
            job.group,
            list(prompt),
            known,
            params.max_tokens or 0,
            Sampling(),
            0,
            0,
            probe=job.probe,
            rollout_id=job.rollout,
        )
        self.open(id, chunk)
        if job.group not in self._groups:
            self._groups.add(job.group)
            due = [each for each in self._early if each.group_id == job.group]
            self._early = [each for each in self._early if each.group_id != job.group]
            for text in due:
                super().add_sibling_tokens(text)


@torch.inference_mode()
def time_forward(runner: Any, draft_tokens: int) -> StepTimes:
    """Return the times of the model's forward pass alone, by vLLM's dummy run, as those of steps.

    Attention and sampling are not in them.  Drafters that see what steps take learn the rest.
    """
    most = runner.scheduler_config.max_num_seqs
    limit = runner.scheduler_config.max_num_batched_tokens
    batches = tuple(each for each in (1, 4, 16, 64, 256) if each <= most)
    drafts = tuple(each for each in (0, 1, 2, 4, 8, 16) if each <= draft_tokens)
    found: dict[int, float] = {}

    def seconds(tokens: int) -> float:
        tokens = min(tokens, limit)
        if tokens not in found:
            found[tokens] = min(_timed(runner, tokens) for _ in range(TRIES))
        return found[tokens]

    table = tuple(tuple(seconds(batch * (1 + count)) for count in drafts) for batch in batches)
    return StepTimes(batches, drafts, table)


def _timed(runner: Any, tokens: int) -> float:
    on_gpu = runner.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    begun = perf_counter()
    runner._dummy_run(tokens)
    if on_gpu:
        torch.cuda.synchronize()
    return perf_counter() - begun
