"""The engine half: drafts for one instance, from the text of every group it serves.

Lives in the engine's worker.  Per step it lets the index take in what each request has just written and
draft from it (one C++ call for the batch), and lets the policy choose which of the drafted tokens are worth
verifying.  The runtime sends the tokens that siblings have written on other instances.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import numpy as np

from seer_core.ports.drafting import DraftBatch, DraftContext, SiblingTokens
from seer_core.ports.engine import ChunkJob
from seer_grouped_spec._index import DraftIndex, DraftIndexError, TokenChoice, Voting
from seer_grouped_spec.choice import OneLengthChoice, make_choice
from seer_grouped_spec.settings import SourceSettings

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int32 = NDArray[np.int32]

__all__ = ["GroupedSource"]

EXPIRE_EVERY = 4096
"""Steps between looks for groups whose time is over."""

NO_REQUEST = -1
"""A handle that the index has not given to anyone: it drafts nothing."""

PADDING = 0
"""A token that every vocabulary has."""

INDEX_FIGURES = ("bytes", "tokens", "groups", "dropped_for_memory", "dropped_by_ttl", "stale", "mismatched")


@attrs.define(eq=False)
class _IndexedGroup:
    """One group in the index, and the handles there of its requests seen so far, here or elsewhere."""

    handle: int
    prompt_tokens: int
    requests: dict[str, int] = attrs.Factory(dict)


class GroupedSource:
    """A ``DraftSource`` over one ``DraftIndex``; see the contract there.

    A request's text is opened once and stays in the index while its group does, wherever its chunks run:
    what it wrote elsewhere arrives with its next chunk here, or before as a sibling's text.
    """

    def __init__(self, settings: Mapping[str, Any], host: DraftContext) -> None:
        self._settings = chosen = msgspec.convert(settings, SourceSettings)
        voting = Voting(
            lookup_min=chosen.lookup_min,
            lookup_max=chosen.lookup_max,
            min_probability=chosen.min_probability,
        )
        self._index = DraftIndex(chosen.memory_bytes, voting=voting)
        self._choice = make_choice(chosen, host)
        self._clock = host.clock or time.perf_counter
        self._ended_s = 0.0
        self._batch_size = 0
        self._groups: dict[str, _IndexedGroup] = {}
        self._free: list[int] = []
        self._requests = np.zeros(0, np.int64)
        self._shifts = np.zeros(0, np.int32)
        """By how many tokens the prompt of a chunk is longer than its group's in the index."""
        self._add_slots(host.max_running)
        self._chances = np.zeros((host.max_running, host.draft_tokens), np.float32)
        self._paths = host.paths
        self._steps = 0
        self._sibling_tokens = 0
        self._report = host.report
        self._vocab_size = host.vocab_size
        self._rollout_id = ""
        self._mismatches_reported = False

    def open(self, job: ChunkJob) -> int:
        """Put the chunk's text so far into the index, as far as it is not there, and return a handle.

        Where there is no memory for it, the chunk runs without drafts.  The first chunk of another rollout
        ends all groups of the last one: their ids may come again, with other text.
        """
        if job.rollout_id != self._rollout_id:
            self._forget_all()
            self._rollout_id = job.rollout_id
        try:
            request = self._catch_up(job)
            shift = job.prompt_tokens - self._groups[job.group_id].prompt_tokens
        except DraftIndexError:
            request, shift = NO_REQUEST, 0
        if not self._free:  # more chunks wait for a place in the batch than the batch has
            self._add_slots(len(self._requests))
        slot = self._free.pop()
        self._requests[slot] = request
        self._shifts[slot] = shift
        self._choice.open(slot, job.probe)
        return slot

    def add_sibling_tokens(self, text: SiblingTokens) -> None:
        """Append to the index what a response has written on another instance.

        What does not fit is left out: its group is over or was dropped, there is no memory for it, or tokens
        before it are missing because its group was dropped and opened again.  So is an earlier response of
        a model with another vocabulary.
        """
        group, tokens = self._groups.get(text.group_id), np.asarray(text.token_ids, np.int32)
        if group is None or text.rollout_id != self._rollout_id or tokens.max(initial=0) >= self._vocab_size:
            return
        with suppress(DraftIndexError):
            request = self._request_of(group, text.request_id)
            self._index.append(request, text.start, tokens)
            self._sibling_tokens += len(text.token_ids)

    def propose(self, batch: DraftBatch) -> None:
        """Draft for the batch, lines or trees, and keep what is worth verifying."""
        handles = batch.handles
        self._choice.learn(handles, batch.written, batch.new_tokens, self._clock() - self._ended_s)
        lengths = batch.lengths - self._shifts[handles]  # groups of a family have prompts of their own
        asked = (self._requests[handles], lengths, batch.written, batch.new_tokens, batch.limits)
        tree: tuple[Int32, ...] = ()
        if self._paths == 1:
            self._index.draft(*asked, batch.drafts, batch.counts, self._chances)
        else:
            tree = (batch.drafts, batch.parents)
            self._index.draft_trees(*asked, *tree, batch.counts, self._chances, paths=self._paths)
        self._choice.choose(handles, batch.lengths, batch.counts, self._chances, *tree)
        if isinstance(self._choice, OneLengthChoice) and not batch.counts.any():
            self._pad(batch, self._choice)
        self._batch_size = len(handles)
        self._steps += 1
        if self._steps % EXPIRE_EVERY == 0:
            self._expire()
        self._ended_s = self._clock()

    def _pad(self, batch: DraftBatch, choice: OneLengthChoice) -> None:
        """Draft a token of no meaning where a step with drafts is the faster one; the engine adds more."""
        if batch.limits.any() and choice.pads(len(batch.handles)):
            row = batch.limits.argmax()
            batch.drafts[row, 0], batch.counts[row] = PADDING, 1

    def close(self, handle: int) -> None:
        """Free the handle; the text stays."""
        self._requests[handle] = NO_REQUEST
        self._free.append(handle)

    def forget(self, group_id: str) -> None:
        """Drop a group."""
        group = self._groups.pop(group_id, None)
        if group is not None:
            with suppress(DraftIndexError):  # gone for memory already
                self._index.drop_group(group.handle)

    def reset(self) -> None:
        """Drop everything."""
        self._forget_all()
        self._index.clear()

    def stats(self) -> dict[str, float]:
        """Return figures of the index, of what drafting costs a step, and of what was learnt from others."""
        index = self._index.stats()
        if index.mismatched and not self._mismatches_reported:
            self._mismatches_reported = True
            self._report(
                "the draft index has another text of some request than the engine, and no drafts for it"
            )
        figures = {f"index_{name}": float(getattr(index, name)) for name in INDEX_FIGURES}
        figures["learnt_tokens"] = float(self._sibling_tokens)
        if isinstance(self._choice, TokenChoice):
            request, context_token, token = self._choice.steps.costs(max(1, self._batch_size))
            figures |= {
                "cost_request_us": request * 1e6,
                "cost_context_token_us": context_token * 1e6,
                "cost_draft_token_us": token * 1e6,
            }
        return figures

    def stop(self) -> None:
        """Do nothing: no thread and no connection was started."""

    def _forget_all(self) -> None:
        for group_id in list(self._groups):
            self.forget(group_id)

    def _add_slots(self, count: int) -> None:
        """Make room for so many more open chunks."""
        size = len(self._requests)
        self._free += range(size, size + count)
        self._requests = np.concatenate((self._requests, np.full(count, NO_REQUEST, np.int64)))
        self._shifts = np.concatenate((self._shifts, np.zeros(count, np.int32)))

    def _group_of(self, job: ChunkJob) -> _IndexedGroup:
        """Return the request's group, opened now if it is new or was dropped for memory."""
        group = self._groups.get(job.group_id)
        if group is not None:
            with suppress(DraftIndexError):
                self._index.touch_group(group.handle, time.monotonic())
                return group
        prompt = np.array(job.token_ids[: job.prompt_tokens], np.int32)
        handle = self._index.open_group(prompt, time.monotonic(), self._settings.group_ttl_s)
        group = self._groups[job.group_id] = _IndexedGroup(handle, len(prompt))
        return group

    def _request_of(self, group: _IndexedGroup, request_id: str) -> int:
        """Return the request's handle in the index, opened now if it is new."""
        if request_id not in group.requests:
            group.requests[request_id] = self._index.open_request(group.handle)
        return group.requests[request_id]

    def _catch_up(self, job: ChunkJob) -> int:
        """Append what the request wrote elsewhere; a text that differs is replaced: the chunk is right.

        So is one that goes on further, as a chunk that was given up had written it: there it stays in the
        group as a sibling's, and drafts what is now written again.
        """
        group = self._group_of(job)
        request = self._request_of(group, job.request_id)
        response = np.array(job.token_ids[job.prompt_tokens :], np.int32)
        try:
            fits = self._index.length(request) <= len(response)
            self._index.append(request, 0, response)
        except DraftIndexError:
            fits = False
        if not fits:
            del group.requests[job.request_id]
            request = self._request_of(group, job.request_id)
            self._index.append(request, 0, response)
        return request

    def _expire(self) -> None:
        """Forget the groups that the index dropped because their time was over."""
        gone = set(self._index.expire(time.monotonic()))
        for group_id in [each for each, group in self._groups.items() if group.handle in gone]:
            del self._groups[group_id]
