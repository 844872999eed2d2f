"""One instance over time: its load, its state, and where its seconds went."""

from __future__ import annotations

import attrs
import msgspec
import numpy as np
import numpy.typing as npt

from seer_cli.chunk_slots import ChunkSlots
from seer_cli.report.bins import TimeBins
from seer_core.model import InstanceInfo
from seer_core.model.chunk_runs import ChunkRun
from seer_core.model.events import InstanceReported

__all__ = ["MOST_CHANGES", "SECONDS", "Change", "InstanceLane"]

FIGURES = ("up", "busy", "running", "reserved", "kv_used", "queued")
MOST_CHANGES = 200
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
    info: InstanceInfo | None = None
    up: bool = False
    running: int = 0
    reserved_tokens: int = 0
    slots: ChunkSlots = attrs.Factory(ChunkSlots)
    changes: list[Change] = attrs.Factory(list)
    bins: TimeBins = attrs.Factory(lambda: TimeBins(len(FIGURES)))
    tokens: int = 0
    chunks: int = 0
    lost_chunks: int = 0
    lost_s: float = 0.0
    stepping_s: float = 0.0
    drafting_s: float = 0.0
    prefill_s: float = 0.0
    fetch_s: float = 0.0
    speeds: dict[int, tuple[float, float]] = attrs.Factory(dict)
    """Seconds and steps of its chunks, by the power of two of the chunks that ran beside."""
    _report: InstanceReported | None = None
    _reported_s: float = 0.0
    _since_s: float = 0.0

    def change(self, now: float, up: bool, what: str) -> None:
        """Note that it came up or went down."""
        self.advance(now)
        self.up, self._report, self._reported_s = up, None, now
        if not up:
            self.running = self.reserved_tokens = 0
        self.note(now, what)

    def go_on(self, before: InstanceLane) -> None:
        """Count from the last report of the same instance on."""
        self._report = before._report

    def note(self, now: float, what: str) -> None:
        """Note what happened to it; of very many such events the first are kept."""
        if len(self.changes) < MOST_CHANGES:
            self.changes.append(Change(now, what))

    def load(self, now: float, running: int, reserved_tokens: int) -> None:
        """Note its load from now on."""
        self.advance(now)
        self.running, self.reserved_tokens = running, reserved_tokens

    def report(self, now: float, report: InstanceReported) -> None:
        """Add its own figures, which count from its start."""
        self.advance(now)
        before = self._report
        since = (0.0, 0.0) if before is None else (before.stepping_s, before.drafting_s)
        most_s = now - self._reported_s  # an instance may have worked before the run, too
        self.stepping_s += min(most_s, max(0.0, report.stepping_s - since[0]))
        self.drafting_s += min(most_s, max(0.0, report.drafting_s - since[1]))
        self._report, self._reported_s = report, now

    def finish(self, chunk: ChunkRun, beside: int) -> None:
        """Add a chunk that is over, when ``beside`` chunks were running, this one included."""
        result, took_s = chunk.result, chunk.end_s - chunk.begin_s
        if result is None:
            self.lost_chunks += 1
            self.lost_s += took_s
            return
        self.chunks += 1
        self.tokens += result.tokens
        steps = result.steps or result.tokens
        load = beside.bit_length() - 1
        seconds, before = self.speeds.get(load, (0.0, 0.0))
        self.speeds[load] = seconds + took_s, before + steps
        if self.info is not None:
            self.prefill_s += result.prefilled_tokens * self.info.prefill_s_per_token
            self.fetch_s += result.pool_tokens * (self.info.fetch_s_per_token or 0.0)

    def advance(self, now: float) -> None:
        """Count the time up to now."""
        if now > self._since_s:
            report = self._report if self.up else None
            self.bins.add(
                self._since_s,
                now,
                (
                    float(self.up),
                    float(self.up and self.running > 0),
                    self.running,
                    self.reserved_tokens,
                    0.0 if report is None else report.kv_usage,
                    0.0 if report is None else report.waiting,
                ),
            )
            self._since_s = now

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
        prefill_s = min(self.prefill_s, stepping_s - drafts_s)
        load_s = min(self.fetch_s, busy_s - stepping_s)
        return {
            "decode": stepping_s - drafts_s - prefill_s,
            "prefill": prefill_s,
            "drafts": drafts_s,
            "load": load_s,
            "between": busy_s - stepping_s - load_s,
            "idle": max(0.0, up_s - busy_s),
            "down": max(0.0, total_s - up_s),
        }
