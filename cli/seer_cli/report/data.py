"""The figures of one run as a page shows them, bounded in size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from seer_session.results import tail_time_s
from seer_trace.chunk_runs import ChunkRun

from seer_cli.report.findings import Finding, busy_s, findings_of, longest_request
from seer_cli.report.finished import DraftCounts
from seer_cli.report.lanes import Change, InstanceLane
from seer_cli.report.pace import StepPace, pace_in_words, paces_of
from seer_cli.report.reading import MOST_CHUNKS, GroupStory, ReadRequest, RunReader
from seer_cli.report.waiting import CAUSES
from seer_cli.request_wording import beginning, rows_of_life, sums

__all__ = ["RunData", "run_of"]

PARTS = 240
"""Parts of the time in pictures over time."""
MOST_LANES = 64
MOST_GROUPS = 500
MOST_LIVES = 200
MOST_POINTS = 500
LONG_S = 100.0
"""Of longer runs the times of chunks have two decimals."""

Column = list[Any]


class LaneData(msgspec.Struct, frozen=True):
    """One instance; figures over time are means of each part of the time."""

    name: str
    node: str
    kv_capacity_tokens: int
    max_running: int
    tokens: int
    chunks: int
    slowness: float | None
    """How many times as long its steps took as the others' with as many requests and as long contexts."""
    pace: str
    """A sentence where its steps took long, and why; else empty."""
    seconds: dict[str, float]
    """Where its time went."""
    changes: list[Change]
    running: list[float]
    reserved: list[float]
    """The part of its KV that was reserved."""
    kv_used: list[float]
    """The part of its KV that it reported as used."""
    queued: list[float]
    idle: list[float]
    """The part of the time in which it was up and had nothing to do."""


class DraftRow(msgspec.Struct, frozen=True):
    """Drafts in some of the steps."""

    key: int
    """Siblings that had finished, tokens that the response had at least, or the position in a draft."""
    steps: int
    tokens_per_step: float
    accepted_share: float | None
    """The part of the drafted tokens that was accepted."""


class GroupRow(msgspec.Struct, frozen=True):
    """One group; times are in seconds since the run's start."""

    id: str
    n: int
    finished: int
    prompt_tokens: int
    first_tokens: int
    """The length of its first finished response, the probe under context-aware scheduling."""
    estimates: list[tuple[float, int]]
    """When the longest finished response became another one, and its tokens: what context-aware scheduling
    estimates the others by from then on.
    """
    median_tokens: float
    longest_tokens: int
    submitted_s: float
    first_s: float
    last_s: float


class LifeData(msgspec.Struct, frozen=True):
    """One request's life in words."""

    request: str
    beginning: str
    rows: list[tuple[str, ...]]
    end: str


class RunData(msgspec.Struct, frozen=True):
    """One run."""

    name: str
    whole: bool
    """Whether all of its requests are over."""
    all_requests: int
    """The requests of all groups, those that are not over among them."""
    figures: dict[str, Any]
    """Fields of ``Summary``: the run's own where it has one, else as far as a trace has them."""
    total_s: float
    tail_begins_s: float
    tail_s: float
    longest_request: str
    """The request whose chunks ran longest."""
    longest_ran_s: float
    busy_s: float
    running: tuple[float, float]
    """How many chunks an instance had on average: before the tail, and in it."""
    bound_s: float | None
    """The least time that any order could have taken, by the simulator's cost model."""
    findings: list[Finding]
    edges_s: list[float]
    lanes: list[LaneData]
    all_lanes: int
    changes: list[Change]
    """What happened to the run as a whole."""
    waiting: list[float]
    tokens_per_s: list[float]
    finishes: list[tuple[float, int]]
    waited_s: dict[str, float]
    """How long requests lacked what, summed over all of them."""
    groups: list[GroupRow]
    all_groups: int
    drafts_by_siblings: list[DraftRow]
    drafts_by_age: list[DraftRow]
    drafts_by_position: list[float]
    """The share of drafts of at least so many tokens that were accepted that far."""
    chunks: dict[str, Column]
    """Columns: begin, length, instance, slot, request, tokens, accepted, moved, end.

    A request is its place in ``chunk_requests``, and an end its place in ``chunk_ends``.
    """
    chunk_requests: list[str]
    chunk_ends: list[str]
    """How chunks were over, in words."""
    all_chunks: int
    lives: list[LifeData]


def run_of(
    reader: RunReader, name: str, summary: Mapping[str, Any] | None = None, bound_s: float | None = None
) -> RunData:
    """Return what a page shows of a run, as far as its reader has come.

    ``summary`` are the figures of its ``Summary``, where it has one.
    """
    reader.catch_up()
    total_s = reader.total_s
    edges_s = np.linspace(0.0, max(total_s, 1e-9), PARTS + 1)
    seconds = {lane.name: lane.seconds(total_s) for lane in reader.lanes.values()}
    paces = paces_of(reader.lanes)
    row, longest = longest_request(reader) if reader.requests else (0, "")
    tail_s = tail_time_s(reader.finishes_s)
    tail_begins_s = max(reader.finishes_s, default=0.0) - tail_s
    tail = np.array([0.0, tail_begins_s, max(total_s, 1e-9)])
    spans = np.maximum(np.diff(tail), 1e-9) * max(1, len(reader.lanes))
    before, after = sum(lane.bins.integrals(tail)[2] for lane in reader.lanes.values()) / spans
    running = round(float(before), 2), round(float(after), 2)
    waiting = reader.waiting.integrals(edges_s)[0] / np.diff(edges_s)
    tokens_per_s = reader.finished.written.integrals(edges_s)[0] / np.diff(edges_s)
    shown = sorted(reader.lanes.values(), key=lambda lane: -_slowness(paces.get(lane.name)))[:MOST_LANES]
    order = {name: number for number, name in enumerate(reader.lanes)}
    lanes = [
        _lane(lane, seconds[lane.name], paces.get(lane.name), edges_s)
        for lane in sorted(shown, key=lambda lane: order[lane.name])
    ]
    kept = _kept(reader)
    chunks, requests, ends = _chunks(reader, kept, {lane.name: number for number, lane in enumerate(lanes)})
    groups = sorted(reader.groups, key=lambda group: -max(group.finishes_s, default=total_s))
    summary = dict(summary or {})
    return RunData(
        name=name,
        whole=not reader.open_requests,
        all_requests=reader.requests,
        figures=_figures(reader, tail_s) | summary,
        total_s=total_s,
        tail_begins_s=tail_begins_s,
        tail_s=tail_s,
        longest_request=longest,
        longest_ran_s=reader.rans_s[row] if reader.requests else 0.0,
        busy_s=busy_s(seconds),
        running=running,
        bound_s=bound_s,
        findings=findings_of(reader, seconds, paces, tail_begins_s),
        edges_s=_rounded(edges_s, 4),
        lanes=lanes,
        all_lanes=len(reader.lanes),
        changes=reader.changes,
        waiting=_rounded(waiting, 2),
        tokens_per_s=_rounded(tokens_per_s, 1),
        finishes=_finishes(reader),
        waited_s=dict(zip(CAUSES, reader.waited_s().sum(axis=0).round(3).tolist(), strict=True)),
        groups=[_group(group) for group in groups[:MOST_GROUPS]],
        all_groups=len(reader.groups),
        drafts_by_siblings=_drafts(reader.finished.by_siblings),
        drafts_by_age=_drafts(reader.finished.by_age),
        drafts_by_position=list(summary.get("acceptance_at", [])),
        chunks=chunks,
        chunk_requests=requests,
        chunk_ends=ends,
        all_chunks=reader.finished.chunks,
        lives=[_life(reader, request) for request in reversed(kept[-MOST_LIVES:])],
    )


def _figures(reader: RunReader, tail_s: float) -> dict[str, Any]:
    """Return those fields of ``Summary`` that follow from a trace."""
    tokens, total_s = reader.finished.tokens, reader.total_s
    requests = len(reader.finishes_s)
    return {
        "requests": requests,
        "groups": sum(len(group.tokens) == group.spec.n for group in reader.groups),
        "tokens": tokens,
        "total_time_s": total_s,
        "tail_time_s": tail_s,
        "throughput_tokens_per_s": tokens / total_s if total_s else 0.0,
        "max_tokens": max((group.longest for group in reader.groups), default=0),
        "chunks": reader.finished.chunks,
        "migrations": reader.finished.migrations,
        "cached_tokens": reader.finished.cached_tokens,
        "pool_tokens": reader.finished.pool_tokens,
        "prefilled_tokens": reader.finished.prefilled_tokens,
        "finish_reasons": dict(reader.reasons),
    }


def _slowness(pace: StepPace | None) -> float:
    return 0.0 if pace is None else pace.slowness or 0.0


def _lane(
    lane: InstanceLane, seconds: dict[str, float], pace: StepPace | None, edges_s: npt.NDArray[np.float64]
) -> LaneData:
    means = lane.over_time(edges_s)
    info = lane.info
    capacity = 0 if info is None else info.kv_capacity_tokens
    return LaneData(
        name=lane.name,
        node="" if info is None else info.node,
        kv_capacity_tokens=capacity,
        max_running=0 if info is None else info.max_running,
        tokens=lane.tokens,
        chunks=lane.chunks,
        slowness=None if pace is None or pace.slowness is None else round(pace.slowness, 3),
        pace="" if pace is None else pace_in_words(lane.name, pace),
        seconds={name: round(each, 4) for name, each in seconds.items()},
        changes=lane.changes,
        running=_rounded(means["running"], 2),
        reserved=_rounded(means["reserved"] / max(1, capacity), 3),
        kv_used=_rounded(means["kv_used"], 3),
        queued=_rounded(means["queued"], 2),
        idle=_rounded(means["up"] - means["busy"], 3),
    )


def _kept(reader: RunReader) -> list[ReadRequest]:
    """Return the requests that finished last, as many as their chunks allow, in order of their finish."""
    kept: list[ReadRequest] = []
    room = MOST_CHUNKS
    for request in reversed(reader.kept):
        room -= len(request.spans)
        if room < 0 and kept:
            break
        kept.append(request)
    return kept[::-1]


def _chunks(
    reader: RunReader, kept: list[ReadRequest], lanes: Mapping[str, int]
) -> tuple[dict[str, Column], list[str], list[str]]:
    rows = []
    requests = []
    ends: dict[str, int] = {}
    digits = 4 if reader.total_s < LONG_S else 2
    for request in kept:
        requests.append(request.request_id)
        for span in request.spans:
            chunk = span[0]
            if isinstance(chunk, ChunkRun) and chunk.instance_id in lanes:
                result = chunk.result
                rows.append(
                    (
                        round(chunk.begin_s - (reader.start_s or 0.0), digits),
                        round(chunk.end_s - chunk.begin_s, digits),
                        lanes[chunk.instance_id],
                        span[1],
                        len(requests) - 1,
                        0 if result is None else result.tokens,
                        0 if result is None else result.accepted,
                        int(chunk.migrated),
                        ends.setdefault(chunk.end, len(ends)),
                    )
                )
    names = ("begin", "length", "instance", "slot", "request", "tokens", "accepted", "moved", "end")
    columns = zip(*rows, strict=True) if rows else [()] * len(names)
    return {name: list(column) for name, column in zip(names, columns, strict=True)}, requests, list(ends)


def _finishes(reader: RunReader) -> list[tuple[float, int]]:
    """Return at most ``MOST_POINTS`` times, each with how many responses had finished."""
    times = np.sort(np.array(reader.finishes_s))
    if not len(times):
        return []
    numbers = np.unique(np.linspace(1, len(times), min(len(times), MOST_POINTS)).round().astype(int))
    return [(0.0, 0)] + [(round(float(times[number - 1]), 4), int(number)) for number in numbers]


def _group(group: GroupStory) -> GroupRow:
    estimates = group.estimates
    return GroupRow(
        id=group.spec.id,
        n=group.spec.n,
        finished=len(group.tokens),
        prompt_tokens=group.spec.prompt_tokens,
        first_tokens=estimates[0][1] if estimates else 0,
        estimates=[(round(at_s, 2), tokens) for at_s, tokens in estimates],
        median_tokens=group.median,
        longest_tokens=group.longest,
        submitted_s=round(group.submitted_s, 3),
        first_s=round(min(group.finishes_s, default=0.0), 3),
        last_s=round(max(group.finishes_s, default=0.0), 3),
    )


def _drafts(counts: Mapping[int, DraftCounts]) -> list[DraftRow]:
    if not any(each.drafted for each in counts.values()):
        return []
    return [
        DraftRow(
            key,
            each.steps,
            round(each.tokens / each.steps, 3),
            round(each.accepted / each.drafted, 3) if each.drafted else None,
        )
        for key, each in sorted(counts.items())
        if each.steps
    ]


def _life(reader: RunReader, request: ReadRequest) -> LifeData:
    if request.words is None:  # they do not change any more
        life = reader.life(request)
        request.words = beginning(life), rows_of_life(life), sums(life)
    return LifeData(request.request_id, *request.words)


def _rounded(values: npt.NDArray[np.float64], digits: int) -> list[float]:
    rounded: list[float] = np.round(values, digits).tolist()
    return rounded
