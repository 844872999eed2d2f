"""Sentences about what cost a run most of its time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping

import msgspec
import numpy as np

from seer_cli.report.lanes import SECONDS, InstanceLane
from seer_cli.report.pace import SLOW, StepPace
from seer_cli.report.reading import RunReader
from seer_cli.request_wording import counted, lacks
from seer_core.errors import printable

__all__ = ["Finding", "busy_s", "findings_of", "longest_request"]

LEAST_SHARE = 0.005
"""A smaller share of the time is no finding."""
CUT = {"aborted": "was given up", "error": "failed"}
"""What happened to a response that is over and was not done, by its finish reason."""
MISLED = 3.0
"""A response with so many times the tokens of its group's first one was not foretold by it."""


class Finding(msgspec.Struct, frozen=True):
    """Something that cost time."""

    title: str
    """What it was, in a few words."""
    text: str
    """What happened, and what it cost."""
    share: float
    """The part of the run's time, or of all instances' time, that it cost at most."""
    request: str = ""
    """A request that shows it."""
    instance: str = ""
    """An instance that shows it."""


def busy_s(seconds: Mapping[str, Mapping[str, float]]) -> float:
    """Return for how long an instance had work, on average."""
    busy = [sum(each[name] for name in SECONDS if name not in ("idle", "down")) for each in seconds.values()]
    return sum(busy) / max(1, len(busy))


def longest_request(reader: RunReader) -> tuple[int, str]:
    """Return the row and the name of the request whose chunks ran longest."""
    row = reader.rans_s.index(max(reader.rans_s))
    group = reader.groups[bisect_right(reader.groups, row, key=lambda each: each.first_row) - 1]
    return row, f"{group.spec.id}/{row - group.first_row}"


def findings_of(
    reader: RunReader,
    seconds: Mapping[str, Mapping[str, float]],
    paces: Mapping[str, StepPace],
    tail_begins_s: float,
) -> list[Finding]:
    """Return what cost time, the most costly first; ``seconds`` are each instance's, by kind."""
    total_s = reader.total_s
    if not total_s or not reader.lanes:
        return []
    everything_s = total_s * len(reader.lanes)
    found = [
        *_slow(reader, seconds, paces, everything_s),
        *_lost(reader, seconds, everything_s),
        *_late(reader, total_s, tail_begins_s),
        *_stayed(reader, paces, total_s),
        *_longest(reader, seconds, paces, total_s),
        *_idle(reader, total_s, tail_begins_s),
        *_overheads(reader, seconds, everything_s),
    ]
    return sorted((each for each in found if each.share >= LEAST_SHARE), key=lambda each: -each.share)


def _slow(
    reader: RunReader,
    seconds: Mapping[str, Mapping[str, float]],
    paces: Mapping[str, StepPace],
    everything_s: float,
) -> Iterator[Finding]:
    for name, pace in paces.items():
        times = pace.slowness
        if times is None or times < SLOW:
            continue
        working_s = sum(seconds[name][kind] for kind in ("decode", "prefill", "drafts"))
        lost_s = working_s * (1 - 1 / times)
        lane = reader.lanes[name]
        advice = " See what else runs on its machine." if lane.is_real else ""
        yield Finding(
            f"Instance {printable(name)} was slow",
            f"With as many requests and as long contexts its steps took {times:.2f} times as long as those of"
            f" the others. At their speed it would have spent {lost_s:,.1f} s less in steps.{advice}",
            lost_s / everything_s,
            instance=name,
        )


def _lost(
    reader: RunReader, seconds: Mapping[str, Mapping[str, float]], everything_s: float
) -> Iterator[Finding]:
    for name, lane in reader.lanes.items():
        if lane.first_loss is not None:
            down_s, times = seconds[name]["down"], lane.losses
            first = f"at {lane.first_loss.at_s:,.1f} s ({printable(lane.first_loss.what)})"
            yield Finding(
                f"Instance {printable(name)} was lost",
                f"It was lost {f'{times} times, first ' if times > 1 else ''}{first}, and down for"
                f" {down_s:,.1f} s. {counted(lane.lost_chunks, 'chunk')} went with it or failed, on"
                f" which {lane.lost_s:,.1f} s had been spent.",
                (down_s + lane.lost_s / max(1, lane.slots.used)) / everything_s,
                instance=name,
            )


def _late(reader: RunReader, total_s: float, tail_begins_s: float) -> Iterator[Finding]:
    """Yield the response that ended last, if it waited.

    The wait delayed the run's end by its length at most, and by no more than the tail took.
    """
    if not reader.kept:
        return
    last = reader.kept[-1]
    group, finished_s = last.group, last.finished_s or 0.0
    waited = reader.life(last).waited_s()
    waited_s = sum(waited.values())
    title, text = "was late", ""
    first_s, first_tokens = next(iter(group.whole), (finished_s, last.tokens))
    if first_s < finished_s and last.tokens >= MISLED * first_tokens:
        title = "looked short"
        text = (
            f"Its first response had {first_tokens:,} tokens and was done at {first_s:,.1f} s;"
            f" the longest has {group.longest:,}. "
        )
    yield Finding(
        f"Group {printable(group.spec.id)} {title}",
        f"{text}Response {printable(last.request_id)} {CUT.get(last.finish_reason or '', 'was done')} at"
        f" {finished_s:,.1f} s: its {last.tokens:,}"
        f" tokens took {reader.rans_s[last.row]:,.1f} s of chunks, and it waited {waited_s:,.1f} s"
        + (f" ({lacks(waited)})." if waited else "."),
        min(waited_s, finished_s - tail_begins_s) / total_s,
        request=last.request_id,
    )


def _stayed(reader: RunReader, paces: Mapping[str, StepPace], total_s: float) -> Iterator[Finding]:
    """Yield the response that ended last, if it stayed on a slow instance while a faster one was idle."""
    if not reader.kept:
        return
    last, start_s = reader.kept[-1], reader.start_s or 0.0
    fast = [lane for lane in reader.lanes.values() if not _is_slow(paces.get(lane.name))]
    stayed_s = faster_s = move_s = tokens = 0.0
    context = last.group.spec.prompt_tokens
    slow: dict[str, None] = {}
    idle: dict[str, None] = {}
    chunks = reader.life(last).chunks
    for chunk in chunks:
        pace, written = paces.get(chunk.instance_id), 0 if chunk.result is None else chunk.result.tokens
        if fast and pace is not None and pace.slowness is not None and _is_slow(pace):
            idle_s, lane = max(
                ((_idle_s(each, chunk.begin_s - start_s, chunk.end_s - start_s), each) for each in fast),
                key=lambda found: found[0],
            )
            if idle_s > 0:
                share = idle_s / (chunk.end_s - chunk.begin_s)
                if not stayed_s:
                    move_s = _move_s(lane, reader.lanes[chunk.instance_id], context + written * (1 - share))
                stayed_s += idle_s
                faster_s += idle_s / pace.slowness
                tokens += written * share
                slow[chunk.instance_id] = idle[lane.name] = None
        context += written
    if stayed_s <= faster_s + move_s:
        return
    text = (
        f"{tokens:,.0f} of its tokens took {stayed_s:,.1f} s on {_names(slow)} while {_names(idle)} had"
        f" nothing to do. There they would have taken {faster_s + move_s:,.1f} s"
    )
    text += f", with {move_s:,.1f} s for its context." if move_s >= 0.05 else "."
    if len(chunks) == 1:
        text += " It ran whole; in chunks it could have moved."
    yield Finding(
        f"Response {printable(last.request_id)} stayed on a slow instance",
        text,
        (stayed_s - faster_s - move_s) / total_s,
        request=last.request_id,
    )


def _is_slow(pace: StepPace | None) -> bool:
    return pace is not None and (pace.slowness or 0.0) >= SLOW


def _names(names: Iterable[str]) -> str:
    return " and ".join(printable(name) for name in names)


def _idle_s(lane: InstanceLane, begin_s: float, end_s: float) -> float:
    """Return for how long an instance was up and had no chunk between these times."""
    (up_s,), (busy_s,) = lane.bins.integrals(np.array([begin_s, end_s]))[:2].tolist()
    return min(max(0.0, float(up_s - busy_s)), end_s - begin_s)


def _move_s(lane: InstanceLane, home: InstanceLane, context_tokens: float) -> float:
    """Return how long an instance needs for a context that is on another, as it measured at its start."""
    if lane.info is None or home.info is None:
        return 0.0
    return context_tokens * lane.info.prefill_s_per_token * lane.info.move_cost_from(home.info)


def _longest(
    reader: RunReader,
    seconds: Mapping[str, Mapping[str, float]],
    paces: Mapping[str, StepPace],
    total_s: float,
) -> Iterator[Finding]:
    """Yield the response whose chunks ran longest, where that is longer than instances had work for."""
    row, request_id = longest_request(reader)
    longest_s, worked_s = reader.rans_s[row], busy_s(seconds)
    if longest_s <= worked_s:
        return
    request = next((each for each in reader.kept if each.row == row), None)
    tokens = 0 if request is None else request.tokens
    slow_s: dict[str, float] = {}
    saved_s = 0.0
    for chunk in [] if request is None else reader.life(request).chunks:
        pace = paces.get(chunk.instance_id)
        if pace is not None and _is_slow(pace):
            ran_s = chunk.end_s - chunk.begin_s
            slow_s[chunk.instance_id] = slow_s.get(chunk.instance_id, 0.0) + ran_s
            saved_s += ran_s * (1 - 1 / (pace.slowness or 1.0))
    text = (
        f"Its {tokens:,} tokens took {longest_s:,.1f} s, and instances had work for {worked_s:,.1f} s on"
        " average."
    )
    if slow_s:
        text += (
            f" Of the {longest_s:,.1f} s, {sum(slow_s.values()):,.1f} s were on {_names(slow_s)}, whose steps"
            f" took longer: at the speed of the others it would have run for {longest_s - saved_s:,.1f} s."
        )
    else:
        text += (
            " No order would have ended the run before it did: only faster steps for it, with fewer requests"
            " beside it or with drafts."
        )
    yield Finding(
        f"Response {printable(request_id)} was the longest",
        text,
        (longest_s - worked_s) / total_s,
        request=request_id,
    )


def _idle(reader: RunReader, total_s: float, tail_begins_s: float) -> Iterator[Finding]:
    edges = np.array([0.0, tail_begins_s, total_s])
    integrals = [lane.bins.integrals(edges)[:2].tolist() for lane in reader.lanes.values()]
    before_s, after_s = (sum(up[part] - busy[part] for up, busy in integrals) for part in (0, 1))
    everything_s, tail_s = total_s * len(integrals), total_s - tail_begins_s
    if tail_s:
        idle_share = after_s / (tail_s * len(integrals))
        yield Finding(
            "Instances were idle in the tail",
            f"From {tail_begins_s:,.1f} s on only the last tenth of the responses was under way, for"
            f" {tail_s:,.1f} s; instances had nothing to do in {idle_share:.0%} of it."
            " Try other policies on these lengths with seer sim.",
            after_s / everything_s,
        )
    yield Finding(
        "Instances were idle before the tail",
        f"In the first {tail_begins_s:,.1f} s instances had nothing to do for {before_s:,.1f} s in all.",
        before_s / everything_s,
    )


def _overheads(
    reader: RunReader, seconds: Mapping[str, Mapping[str, float]], everything_s: float
) -> Iterator[Finding]:
    sums = {kind: sum(each[kind] for each in seconds.values()) for kind in SECONDS}
    again = reader.finished.again_tokens / max(1, reader.finished.prefilled_tokens)
    yield Finding(
        "Context was prefilled again",
        f"Chunks that went on with a response prefilled {reader.finished.again_tokens:,} tokens of context,"
        f" {again:.0%} of all prefill, as neither their instance nor the pool had its KV.",
        again * sums["prefill"] / everything_s,
    )
    yield Finding(
        "Instances with work made no steps",
        f"For {sums['between']:,.1f} s in all an instance had chunks and made no step: the time of chunks on"
        " their way, of work between steps, and of reports that were not yet there.",
        sums["between"] / everything_s,
    )
    drafts = [each for each in reader.finished.by_siblings.values() if each.drafted]
    steps, tokens = sum(each.steps for each in drafts), sum(each.tokens for each in drafts)
    working_s = sums["decode"] + sums["drafts"]
    if steps and working_s and (tokens / steps - 1) < sums["drafts"] / max(1e-9, sums["decode"]):
        yield Finding(
            "Drafts cost more than they brought",
            f"They took {sums['drafts'] / working_s:.0%} of the time of decoding, for {tokens / steps:.2f}"
            " tokens in each step of a request.",
            sums["drafts"] / everything_s,
        )
