"""One instance over time: its load, its state, and where its seconds went."""

from __future__ import annotations

from array import array

import attrs
import msgspec
import numpy as np
import numpy.typing as npt
from seer_trace.chunk_runs import ChunkRun

from seer_cli.chunk_slots import ChunkSlots
from seer_cli.report.bins import TimeBins
from seer_core.model import InstanceInfo
from seer_core.model.events import InstanceReported

__all__ = ["MOST_CHANGES", "SECONDS", "Change", "InstanceLane"]

FIGURES = ("up", "busy", "running", "reserved", "kv_used", "queued")
MOST_CHANGES = 200
STATES_AT_ONCE = 512
SECONDS = ("decode", "prefill", "drafts", "load", "between", "idle", "down")
"""Where an instance's time goes; the seconds of all of them add up to the run's."""


class Change(msgspec.Struct, frozen=True):
    """Something that happened to an instance or to the run."""

    at_s: float
    """When, in seconds since the run's start."""
    what: str
    """The change, in words."""


@attrs.define(eq=False)
class InstanceLane:
    """Sums over what a trace has of one instance; times are in seconds since the run's start."""

    name: str
    number: int = 0
    info: InstanceInfo | None = None
    up: bool = False
    running: int = 0
    reserved_tokens: int = 0
    slots: ChunkSlots = attrs.Factory(ChunkSlots)
    changes: list[Change] = attrs.Factory(list)
    bins: TimeBins = attrs.Factory(lambda: TimeBins(len(FIGURES)))
    tokens: int = 0
    chunks: int = 0
    losses: int = 0
    first_loss: Change | None = None
    lost_chunks: int = 0
    lost_s: float = 0.0
    stepping_s: float = 0.0
    drafting_s: float = 0.0
    prefilled_tokens: float = 0.0
    fetched_tokens: float = 0.0
    steps: dict[tuple[int, int], npt.NDArray[np.float64]] = attrs.Factory(dict)
    """Sums over its chunks' steps, by the powers of two of the requests and of the tokens of KV in a step.

    The sums are of steps, seconds without waits in its queue, requests, tokens of KV, and seconds with these
    waits.
    """
    _report: InstanceReported | None = None
    _reported_s: float = 0.0
    _states: array[float] = attrs.Factory(lambda: array("d", [0.0] * 6))
    """Rows of a time and of what has held since then: figures but ``busy``, which follows from others."""

    @property
    def is_real(self) -> bool:
        """Whether it runs a model on a machine, whose files it names; a simulated one has none."""
        return self.info is not None and bool(self.info.model or self.info.fingerprint)

    def change(self, now: float, up: bool, what: str) -> None:
        """Note that it came up or went down."""
        self.up, self._report, self._reported_s = up, None, now
        if not up:
            self.running = self.reserved_tokens = 0
        self._mark(now)
        self.note(now, what)

    def be_lost(self, now: float, reason: str) -> None:
        """Note that it was lost."""
        what = f"lost: {reason}"
        self.losses += 1
        self.first_loss = self.first_loss or Change(now, what)
        self.change(now, False, what)

    def go_on(self, before: InstanceLane) -> None:
        """Count from the last report of the same instance on."""
        self._report = before._report

    def note(self, now: float, what: str) -> None:
        """Note what happened to it; of very many such events the first are kept."""
        if len(self.changes) < MOST_CHANGES:
            self.changes.append(Change(now, what))

    def load(self, now: float, running: int, reserved_tokens: int) -> None:
        """Note its load from now on."""
        self.running, self.reserved_tokens = running, reserved_tokens
        self._mark(now)

    def report(self, now: float, report: InstanceReported) -> None:
        """Add its own figures, which count from its start."""
        before = self._report
        since = (0.0, 0.0) if before is None else (before.stepping_s, before.drafting_s)
        most_s = now - self._reported_s  # an instance may have worked before the run, too
        self.stepping_s += min(most_s, max(0.0, report.stepping_s - since[0]))
        self.drafting_s += min(most_s, max(0.0, report.drafting_s - since[1]))
        self._report, self._reported_s = report, now
        self._mark(now)

    def lose(self, chunk: ChunkRun) -> None:
        """Add a chunk that brought nothing."""
        self.lost_chunks += 1
        self.lost_s += chunk.end_s - chunk.begin_s

    def finish(self, chunks: int, tokens: int, prefilled_tokens: float, fetched_tokens: float) -> None:
        """Add chunks that brought so many tokens, after so much context was prefilled, and fetched."""
        self.chunks += chunks
        self.tokens += tokens
        self.prefilled_tokens += prefilled_tokens
        self.fetched_tokens += fetched_tokens

    def add_steps(self, chunks: npt.NDArray[np.float64]) -> None:
        """Add the steps of chunks: rows of begin, end and steps."""
        begins_s, ends_s, steps = chunks
        some = (ends_s > begins_s) & (steps > 0)
        took_s, steps = (ends_s - begins_s)[some], steps[some]
        if not len(steps):
            return
        whole = self.bins.until(ends_s[some]) - self.bins.until(begins_s[some])
        means = dict(zip(FIGURES, whole / took_s, strict=True))
        there = np.maximum(means["running"], 1.0)
        decoding = np.clip(there - means["queued"], 0.5, there)
        capacity = 0 if self.info is None else self.info.kv_capacity_tokens
        context = np.where(means["kv_used"] > 0, means["kv_used"] * capacity, means["reserved"])
        kinds = np.stack([np.floor(np.log2(np.maximum(each, 1.0))) for each in (decoding, context)], axis=1)
        sums = np.stack([steps, took_s * decoding / there, steps * decoding, steps * context, took_s], axis=1)
        found, kind_of = np.unique(kinds.astype(np.int64), axis=0, return_inverse=True)
        added = np.zeros((len(found), sums.shape[1]))
        np.add.at(added, kind_of.reshape(-1), sums)
        for (requests, tokens), values in zip(found.tolist(), added, strict=True):
            before = self.steps.get((requests, tokens))
            self.steps[requests, tokens] = values if before is None else before + values

    def _mark(self, now: float) -> None:
        """Note what holds from now on."""
        report = self._report if self.up else None
        states = self._states
        states.extend(
            (
                *(now, self.up, self.running, self.reserved_tokens),
                *((0.0, 0.0) if report is None else (report.kv_usage, report.waiting)),
            )
        )
        if len(states) >= STATES_AT_ONCE * 6:
            self.catch_up(now)

    def catch_up(self, now: float) -> None:
        """Add up the time to now."""
        times_s, up, running, reserved, used, queued = np.array(self._states).reshape(-1, 6).T
        ends_s = np.append(times_s[1:], now)
        some = ends_s > times_s
        busy = up * (running > 0)
        figures = np.stack([up, busy, running, reserved, used, queued])
        self.bins.add_all(times_s[some], ends_s[some], figures[:, some])
        del self._states[:-6]
        self._states[-6] = now

    def over_time(self, edges_s: npt.NDArray[np.float64]) -> dict[str, npt.NDArray[np.float64]]:
        """Return each figure's mean between every two edges."""
        means = self.bins.integrals(edges_s) / np.maximum(np.diff(edges_s), 1e-12)
        return dict(zip(FIGURES, means, strict=True))

    def seconds(self, total_s: float) -> dict[str, float]:
        """Return where its time went.

        ``decode`` is what is left of the time in steps without ``drafts`` and ``prefill``.  That last one and
        ``load`` are its tokens times what the instance measured for one at its start.  ``between`` is the
        time in which chunks were there and no step ran: the way to the instance and back, and waits for KV.
        Where an instance reports no steps all of that is ``decode``.
        """
        (up_s,), (busy_s,) = self.bins.integrals(np.array([0.0, total_s]))[:2].tolist()
        stepping_s = min(self.stepping_s or busy_s, busy_s)
        drafts_s = min(self.drafting_s, stepping_s)
        info = self.info
        prefill_s = 0.0 if info is None else self.prefilled_tokens * info.prefill_s_per_token
        prefill_s = min(prefill_s, stepping_s - drafts_s)
        load_s = 0.0 if info is None else self.fetched_tokens * (info.fetch_s_per_token or 0.0)
        load_s = min(load_s, busy_s - stepping_s)
        return {
            "decode": stepping_s - drafts_s - prefill_s,
            "prefill": prefill_s,
            "drafts": drafts_s,
            "load": load_s,
            "between": busy_s - stepping_s - load_s,
            "idle": max(0.0, up_s - busy_s),
            "down": max(0.0, total_s - up_s),
        }
