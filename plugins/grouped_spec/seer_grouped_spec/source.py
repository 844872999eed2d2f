"""The engine half: drafts for one instance, from the text of every group it serves.

Lives in the engine's worker.  Per step it lets the index take in what each request has just written and
draft from it (one C++ call for the batch), and lets the policy choose which of the drafted tokens are worth
verifying.  What other instances write of the same groups comes in on the client's thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import numpy as np

from seer_core.drafting import DraftBatch, DraftHost
from seer_core.ports import ChunkJob
from seer_grouped_spec._index import DraftIndex, DraftIndexError, TokenChoice, Voting
from seer_grouped_spec.choice import make_choice
from seer_grouped_spec.client import DraftClient
from seer_grouped_spec.settings import SourceSettings

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int32 = NDArray[np.int32]

__all__ = ["GroupedSource"]

SHARE_EVERY = 16
"""Steps between hand-overs of new tokens to the client, so that a step pays for few of them."""

EXPIRE_EVERY = 4096
"""Steps between looks for groups whose time is over."""

NO_REQUEST = -1
"""A handle that the index has not given to anyone: it drafts nothing."""

INDEX_FIGURES = ("bytes", "tokens", "groups", "dropped_for_memory", "dropped_by_ttl", "stale", "mismatched")


@attrs.define(eq=False)
class _Text:
    """One request's text in the index, and how much of its response the servers have been given."""

    group_name: str
    request_id: str
    handle: int
    shared: int = 0
    runs: bool = False


@attrs.define(eq=False)
class _Group:
    """One group in the index and its requests seen so far, here or elsewhere."""

    handle: int
    texts: dict[str, _Text] = attrs.Factory(dict)


class GroupedSource:
    """A ``DraftSource`` over one ``DraftIndex``; see the contract there.

    A request's text is opened once and stays in the index while its group does, wherever its chunks run:
    what it wrote elsewhere arrives with its next chunk here, or before from the servers.
    """

    def __init__(self, settings: Mapping[str, Any], host: DraftHost) -> None:
        self._settings = chosen = msgspec.convert(settings, SourceSettings)
        voting = Voting(
            lookup_min=chosen.lookup_min,
            lookup_max=chosen.lookup_max,
            min_probability=chosen.min_probability,
        )
        self._index = DraftIndex(chosen.memory_bytes, voting=voting)
        self._choice = make_choice(chosen, host)
        self._ended_s = 0.0
        self._batch_size = 0
        self._groups: dict[str, _Group] = {}
        self._texts: list[_Text | None] = []
        self._free: list[int] = []
        self._requests = np.zeros(0, np.int64)
        self._add_slots(host.max_running)
        self._chances = np.zeros((host.max_running, host.draft_tokens), np.float32)
        self._steps = 0
        self._lock = threading.Lock()  # guards the maps; held for dictionary look-ups only
        self._client: DraftClient | None = None
        if chosen.endpoints:
            self._client = DraftClient(
                chosen.endpoints,
                deliver=self._deliver,
                text=self._text,
                tell=host.tell,
                token=chosen.token or None,
                flush_s=chosen.flush_s,
                fetch_s=chosen.fetch_s,
            )
            self._client.start()
        self._tell = host.tell
        self._rollout_id = ""
        self._mismatches_told = False

    def open(self, job: ChunkJob) -> int:
        """Put the chunk's text so far into the index, as far as it is not there, and return a handle.

        Where there is no memory for it, the chunk runs without drafts.  The first chunk of another rollout
        ends all groups of the last one: their ids may come again, with other text.
        """
        if job.rollout_id != self._rollout_id:
            self._forget_all()
            self._rollout_id = job.rollout_id
        try:
            text = self._catch_up(job, self._text_of(job))
        except DraftIndexError:
            text = None
        if not self._free:  # more chunks wait for a place in the batch than the batch has
            self._add_slots(len(self._texts))
        slot = self._free.pop()
        self._texts[slot] = text
        if text is not None:
            text.runs = True
        self._requests[slot] = NO_REQUEST if text is None else text.handle
        self._choice.open(slot, job.probe)
        return slot

    def propose(self, batch: DraftBatch) -> None:
        """Draft for the batch and keep what is worth verifying."""
        handles = batch.handles
        self._choice.learn(handles, batch.sampled, time.perf_counter() - self._ended_s)
        self._index.draft(
            self._requests[handles],
            batch.rows,
            batch.lengths,
            batch.limits,
            batch.tokens,
            batch.drafts,
            batch.counts,
            self._chances,
        )
        self._choice.choose(handles, batch.lengths, batch.counts, self._chances)
        self._batch_size = len(handles)
        self._steps += 1
        if self._client is not None and self._steps % SHARE_EVERY == 0:
            for slot in handles.tolist():
                self._share(self._texts[slot])
        if self._steps % EXPIRE_EVERY == 0:
            self._expire()
        self._ended_s = time.perf_counter()

    def close(self, handle: int) -> None:
        """Hand over what is left of the chunk's text and free the handle; the text stays."""
        text, self._texts[handle] = self._texts[handle], None
        if text is not None:
            text.runs = False
        self._requests[handle] = NO_REQUEST
        self._free.append(handle)
        self._share(text)

    def forget(self, group_id: str) -> None:
        """Drop a group here; the servers drop it when no instance wants it any more."""
        self._drop(self._name(group_id))

    def reset(self) -> None:
        """Drop everything, here and, for this instance's part, on the servers."""
        self._forget_all()
        self._index.clear()

    def stats(self) -> dict[str, float]:
        """Return figures of the index, of what drafting costs a step, and of the client, by prefix."""
        index = self._index.stats()
        if index.mismatched and not self._mismatches_told:
            self._mismatches_told = True
            self._tell(
                "the draft index has another text of some request than the engine, and no drafts for it"
            )
        figures = {f"index_{name}": float(getattr(index, name)) for name in INDEX_FIGURES}
        if isinstance(self._choice, TokenChoice):
            request, context_token, token = self._choice.steps.costs(max(1, self._batch_size))
            figures |= {
                "cost_request_us": request * 1e6,
                "cost_context_token_us": context_token * 1e6,
                "cost_draft_token_us": token * 1e6,
            }
        if self._client is not None:
            figures |= {f"client_{name}": float(value) for name, value in self._client.stats().items()}
        return figures

    def stop(self) -> None:
        """End the client's thread."""
        if self._client is not None:
            self._client.stop()

    def _name(self, group_id: str) -> str:
        """Return what a group is called here and on the servers, where no other rollout's group is."""
        return f"{self._rollout_id}/{group_id}"

    def _drop(self, name: str) -> None:
        with self._lock:
            group = self._groups.pop(name, None)
        if group is None:
            return
        with suppress(DraftIndexError):  # gone for memory already
            self._index.drop_group(group.handle)
        if self._client is not None:
            self._client.unregister_group(name)

    def _forget_all(self) -> None:
        for name in list(self._groups):
            self._drop(name)

    def _add_slots(self, count: int) -> None:
        """Make room for so many more open chunks."""
        self._free += range(len(self._texts), len(self._texts) + count)
        self._texts += [None] * count
        self._requests = np.concatenate((self._requests, np.full(count, NO_REQUEST, np.int64)))

    def _text_of(self, job: ChunkJob) -> _Text:
        """Return the request's text, opened now if it is new or its group was dropped meanwhile."""
        name = self._name(job.group_id)
        group = self._groups.get(name)
        if group is None:
            return self._new_group(job)
        text = group.texts.get(job.request_id)
        try:
            if text is None:
                text = self._new_text(group, name, job.request_id)
            else:
                self._index.length(text.handle)
            self._index.touch_group(group.handle, time.monotonic())
            return text
        except DraftIndexError:  # dropped for memory
            return self._new_group(job)

    def _new_group(self, job: ChunkJob) -> _Text:
        prompt = np.array(job.token_ids[: job.prompt_tokens], np.int32)
        ttl_s = self._settings.group_ttl_s
        group = _Group(self._index.open_group(prompt, time.monotonic(), ttl_s))
        name = self._name(job.group_id)
        with self._lock:
            self._groups[name] = group
        if self._client is not None:
            self._client.unregister_group(name)  # if it is known, all of it is to come again
            self._client.register_group(name, ttl_s)
        return self._new_text(group, name, job.request_id)

    def _new_text(self, group: _Group, name: str, request_id: str) -> _Text:
        text = _Text(name, request_id, self._index.open_request(group.handle))
        with self._lock:
            return group.texts.setdefault(request_id, text)

    def _catch_up(self, job: ChunkJob, text: _Text) -> _Text:
        """Append what the request wrote elsewhere; a text that differs is replaced: the chunk is right.

        So is one that goes on further, as an instance that was lost had written it: there it stays in the
        group as a sibling's, and drafts what is now written again.
        """
        response = np.array(job.token_ids[job.prompt_tokens :], np.int32)
        try:
            fits = self._index.length(text.handle) <= len(response)
            self._index.append(text.handle, 0, response)
        except DraftIndexError:
            fits = False
        if not fits:
            group = self._groups[text.group_name]
            with self._lock:
                del group.texts[job.request_id]
            text = self._new_text(group, text.group_name, job.request_id)
            self._index.append(text.handle, 0, response)
        text.shared = max(text.shared, len(response))  # whoever wrote it has shared it
        if self._client is not None:
            self._client.appended(text.group_name, text.request_id, text.shared, response[:0])
        return text

    def _share(self, text: _Text | None) -> None:
        """Give the client what the request has written since the last time."""
        if self._client is None or text is None:
            return
        try:
            written = self._index.length(text.handle)
            if written > text.shared:
                tokens = self._index.tokens(text.handle, text.shared, written)
                self._client.appended(text.group_name, text.request_id, text.shared, tokens)
                text.shared = written
        except DraftIndexError:
            pass  # dropped for memory; it will be opened anew

    def _deliver(self, name: str, request_id: str, prev_token_count: int, tokens: Int32) -> None:
        """Take in what another instance wrote; called on the client's thread.

        What raises, for its group was dropped for memory or its text replaced, is not delivered again.
        """
        with self._lock:
            group = self._groups.get(name)
            text = group.texts.get(request_id) if group is not None else None
        if group is None:
            return
        if text is None:
            text = self._new_text(group, name, request_id)
        if text.runs:  # the last words of an instance that was lost: they are being written again, here
            return
        self._index.append(text.handle, prev_token_count, tokens)
        text.shared = max(text.shared, prev_token_count + len(tokens))

    def _text(self, name: str, request_id: str, start: int, stop: int) -> Int32 | None:
        """Return tokens that a server asks for again; called on the client's thread."""
        with self._lock:
            group = self._groups.get(name)
            text = group.texts.get(request_id) if group is not None else None
        if text is None:
            return None
        try:
            return self._index.tokens(text.handle, start, min(stop, self._index.length(text.handle)))
        except DraftIndexError:
            return None

    def _expire(self) -> None:
        """Forget the groups that the index dropped because their time was over."""
        gone = set(self._index.expire(time.monotonic()))
        for name in [name for name, group in self._groups.items() if group.handle in gone]:
            self._drop(name)
