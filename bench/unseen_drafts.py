"""How well does the simulator predict drafts on text that it has not seen?

Groups of recorded responses are split into two halves at random.  One half is rolled out in the simulator,
whose lengths are given, and its drafts are predicted from the other half.  The measure is the same rollout
with drafts as in a replay of its own text, which was 2.7 % (total) and 12.1 % (tail) off vLLM's own scheduler
at worst (answered.md).  A round is a split.

``alike``: a response is drafted like one of the other half that is about as long, its siblings like one
group, as `seer sim --drafts` does with less than 32 groups.  ``pooled``: like the mean of all, weighted by
how near their lengths are.  ``siblings``: by position and by the number of finished siblings, as `seer sim
--drafts` does from 32 groups on.  ``mixture``: pooled, times an effect of the group and one of the response,
drawn from log-normal distributions that are fitted to the other half.  ``drawn``: by position and number of
finished siblings, times such effects about that; ``drawn x 3`` is the mean of the times of three draws.
``sample 3`` and ``sample 6``: as ``alike``, but so many groups of the half itself have been replayed.

``recorded-text`` is the first fifth of 250 responses of a reasoning model (not published, ``--data`` names
its folder) on two instances, whose tokens of context are five times as dear; ``tiny-reasoner`` is the bundled
model's text on one instance.  The goal is 5% (total) and 15% (tail) at worst.  The number of groups is the
limit.  Groups of one text differ by a fifth in what drafts are worth.  So the means of two halves of 12
groups, as of recorded-text, differ by a tenth, which no method can see in the other half.  Those of 32
groups, as of tiny-reasoner, differ by less.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import exp, log
from pathlib import Path
from random import Random
from statistics import fmean, median, pstdev
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from seer_grouped_spec.replay import Recording
from seer_lab.emulated import dearer
from seer_lab.policies import POLICIES
from seer_lab.replayed import ReplayedGroup, drafts_of_groups, replayed_group, with_replayed
from seer_lab.simulate import simulate
from seer_lab.texts import RecordedText
from seer_lab.workloads import CLUSTERS, Workload, crowded
from seer_sim.replayed import SEGMENT_TOKENS, ReplayedDrafts, ReplayedResponse

from bench.harness import DATA, Row, markdown, percent
from bench.paced import LOADS, PRESSURE, TINY_FACTOR

DEPENDS_ON = ("backends/sim", "lab", "plugins/grouped_spec", "bench/data")
ROUNDS = 5

TEXTS: Mapping[str, tuple[int, int]] = {"tiny-reasoner": (1, TINY_FACTOR), "recorded-text": (2, 5)}
"""Instances of a half, and how many times as dear its tokens of context are."""

USUAL = {"tiny-reasoner": "siblings", "recorded-text": "alike"}
"""The method of `seer sim --drafts` for as many groups as halves of a text have."""

ON = ("qwen2-vl-72b", "qwen3-32b")
DRAWS = 3
METHODS = ("alike", "pooled", "siblings", "mixture", "drawn", f"drawn x {DRAWS}", "sample 3", "sample 6")
NEAR = 0.5
"""The spread of the logarithm of lengths that count as near."""


class ReplayedText(NamedTuple):
    """Replayed responses by request; ``finished`` has the lengths of a group's responses."""

    drafts: ReplayedDrafts
    responses: Mapping[str, ReplayedResponse]
    lengths: Mapping[str, Sequence[int]]


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--only", nargs="+", choices=list(TEXTS), default=["tiny-reasoner"], help="texts")
    parser.add_argument("--on", nargs="+", choices=ON, default=list(ON), help="models and GPUs")
    parser.add_argument("--method", nargs="+", choices=METHODS, help="these alone (default all)")
    parser.add_argument("--data", type=Path, default=DATA.parent, help="folder of data that is not published")


def run(options: argparse.Namespace) -> list[Row]:
    """Predict one half of each split by every method."""
    rows: list[Row] = []
    for name in options.only:
        load = LOADS[name](options.data)
        played = {each.group: replayed_group(each) for each in _recordings(load)}
        print(f"{name} is replayed", file=sys.stderr, flush=True)
        for split in range(options.rounds):
            names = sorted(played)
            Random(split).shuffle(names)
            one, two = names[: len(names) // 2], names[len(names) // 2 :]
            texts = [_text([played[each] for each in half]) for half in (one, two)]
            samples = {count: _text([played[each] for each in (*one, *two[:count])]) for count in (3, 6)}
            for on in options.on:
                half = _half(load, two, on, *TEXTS[name])
                found = {"own": _figures(half, texts[1].drafts)}
                for method in options.method or METHODS:
                    found[method] = _mean(
                        _figures(half, _predicted(method, *texts, samples, seed))
                        for seed in range(split, split + (DRAWS if method.endswith(f"x {DRAWS}") else 1))
                    )
                rows.append({"text": name, "on": on, "split": split, "figures": found})
                print(f"{name} on {on}, split {split}: {found}", file=sys.stderr, flush=True)
    return rows


def _recordings(load: Workload) -> list[Recording]:
    """Return the text of a workload's groups."""
    text = load.text
    assert text is not None
    return [
        Recording(
            group.id,
            np.array(text.prompts[group.id], np.int32),
            tuple(
                np.array(text.responses[f"{group.id}/{number}"], np.int32)
                for number in range(len(group.output_tokens))
            ),
        )
        for group in load.groups(0)
    ]


def _text(groups: Sequence[ReplayedGroup]) -> ReplayedText:
    drafts = drafts_of_groups(groups)
    lengths: dict[str, list[int]] = {}
    for each in drafts.responses:
        lengths.setdefault(each.group, []).append(each.tokens)
    return ReplayedText(drafts, {each.id: each for each in drafts.responses}, lengths)


def _half(load: Workload, ids: Sequence[str], on: str, instances: int, by: int) -> Workload:
    """Return the workload with these groups alone, on so many instances."""
    wanted = set(ids)
    assert load.text is not None
    text = RecordedText(
        {group: tokens for group, tokens in load.text.prompts.items() if group in wanted},
        {name: tokens for name, tokens in load.text.responses.items() if name.rpartition("/")[0] in wanted},
    )
    groups = [group for group in load.groups(0) if group.id in wanted]
    half = crowded(load.name, [groups], CLUSTERS[on], instances, PRESSURE)
    return replace(half, tables=dearer(half.tables, by), text=text)


def _mean(found: Iterable[dict[str, float]]) -> dict[str, float]:
    every = list(found)
    return {name: fmean(each[name] for each in every) for name in every[0]}


def _figures(half: Workload, drafts: ReplayedDrafts) -> dict[str, float]:
    summary = simulate(with_replayed(half, drafts), POLICIES["seer"]).summary
    return {"total_time_s": summary.total_time_s, "tail_time_s": summary.tail_time_s}


def _predicted(
    method: str, source: ReplayedText, target: ReplayedText, samples: Mapping[int, ReplayedText], split: int
) -> ReplayedDrafts:
    """Return the drafts of the target's responses; of these, methods but samples see the lengths alone."""
    if method in ("alike", "siblings"):
        return replace(source.drafts, unseen=method)
    if method.startswith("sample"):
        return replace(samples[int(method.split()[1])].drafts, unseen="alike")
    drawn = method.startswith("drawn")
    gain = _by_siblings(source, target) if drawn else _pooled(source)
    effects = {}
    if drawn:
        expected = _by_siblings(source, source)
        effects = _effects(source, target, split, lambda _: expected)
    elif method == "mixture":
        effects = _effects(source, target, split, lambda group: _pooled(source, without=group))
    responses = tuple(
        _made(each, gain, exp(effects.get(each.group, 0.0) + effects.get(each.id, 0.0)))
        for each in target.responses.values()
    )
    return replace(source.drafts, responses=responses)


Gain = Callable[[ReplayedResponse, int], float]
"""The tokens that a step accepts in a stretch of a response."""


def _tokens(response: ReplayedResponse, stretch: int) -> int:
    return min(SEGMENT_TOKENS, response.tokens - stretch * SEGMENT_TOKENS)


def _made(response: ReplayedResponse, gain: Gain, factor: float) -> ReplayedResponse:
    """Return a response of that length with such steps; what rounding leaves goes to the next stretch."""
    steps, left = [], 0.0
    for stretch in range(len(response.steps)):
        wanted = left + _tokens(response, stretch) / (1 + gain(response, stretch) * factor)
        steps.append(max(1, round(wanted)))
        left = wanted - steps[-1]
    return replace(response, steps=tuple(steps))


def _pooled(source: ReplayedText, without: str = "") -> Gain:
    """Return the mean gain at a stretch of responses that are about as long."""
    known: dict[tuple[int, int], float] = {}
    pool = [each for each in source.responses.values() if each.group != without]

    def gain(response: ReplayedResponse, stretch: int) -> float:
        key = response.tokens, stretch
        if key not in known:
            tokens = steps = 0.0
            for each in pool:
                weight = exp(-0.5 * (log(each.tokens / response.tokens) / NEAR) ** 2)
                at = min(stretch, len(each.steps) - 1)
                tokens += weight * _tokens(each, at)
                steps += weight * each.steps[at]
            known[key] = max(0.0, tokens / steps - 1)
        return known[key]

    return gain


def _by_siblings(source: ReplayedText, target: ReplayedText) -> Gain:
    """Return the mean gain by position and by the quarter of siblings that has finished."""
    counted: dict[tuple[int, int], list[float]] = {}

    def key(text: ReplayedText, response: ReplayedResponse, stretch: int) -> tuple[int, int]:
        lengths = text.lengths[response.group]
        finished = sum(length < stretch * SEGMENT_TOKENS for length in lengths)
        return min(stretch, 24) // 2, min(3, 4 * finished // len(lengths))

    for response in source.responses.values():
        for stretch, steps in enumerate(response.steps):
            sums = counted.setdefault(key(source, response, stretch), [0.0, 0.0])
            sums[0] += _tokens(response, stretch)
            sums[1] += steps
    mean = sum(each[0] for each in counted.values()) / sum(each[1] for each in counted.values())

    def gain(response: ReplayedResponse, stretch: int) -> float:
        tokens, steps = counted.get(key(target, response, stretch), [0.0, 0.0])
        few = 10 * SEGMENT_TOKENS  # cells with little text are drawn to the mean
        return max(0.0, (tokens + few) / (steps + few / mean) - 1)

    return gain


def _effects(
    source: ReplayedText, target: ReplayedText, split: int, expected: Callable[[str], Gain]
) -> dict[str, float]:
    """Return log-normal effects of the target's groups and responses, drawn as those of the source vary.

    They vary about what ``expected`` says of a group of the source.
    """
    groups: dict[str, float] = {}
    responses: list[float] = []
    for group in source.lengths:
        gain = expected(group)
        mine = [each for each in source.responses.values() if each.group == group]
        groups[group] = _excess(mine, gain)
        responses += [_excess([each], gain) - groups[group] for each in mine]
    spread, own = pstdev(groups.values()), pstdev(responses)
    draw = Random(split)
    found = {group: draw.gauss(-(spread**2) / 2, spread) for group in target.lengths}
    return found | {name: draw.gauss(-(own**2) / 2, own) for name in target.responses}


def _excess(responses: Sequence[ReplayedResponse], gain: Gain) -> float:
    """Return the logarithm of the gain of responses over that of a model of it."""
    tokens = sum(each.tokens for each in responses)
    real = tokens / sum(sum(each.steps) for each in responses) - 1
    modelled = sum(
        _tokens(each, stretch) / (1 + gain(each, stretch))
        for each in responses
        for stretch in range(len(each.steps))
    )
    return log(max(real, 0.01) / max(tokens / modelled - 1, 0.01))


def errors(rows: Sequence[Row]) -> dict[tuple[str, str, str], dict[str, list[float]]]:
    """Return by text, instances and method: how far each split's total and tail are off, without signs."""
    found: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for row in rows:
        own = row["figures"]["own"]
        for method in METHODS:
            for name, value in row["figures"].get(method, {}).items():
                off = abs(value / own[name] - 1)
                found.setdefault((row["text"], row["on"], method), {}).setdefault(name, []).append(off)
    return found


def table(rows: Sequence[Row]) -> str:
    """Return the median and the worst error of each method, by text and instances."""
    columns = ["text", "on", "method", "splits", "total off: median", "worst", "tail off: median", "worst"]
    lines = []
    for (text, on, method), off in errors(rows).items():
        cells = [f"{kind(off[name]):.1%}" for name in off for kind in (median, max)]
        lines.append([text, on, method, str(len(off["total_time_s"])), *cells])
    return markdown(columns, lines, left=3)


def answer(rows: Sequence[Row]) -> str:
    """Return the worst errors of what `seer sim --drafts` does with so many groups, by text."""
    worst: dict[str, list[float]] = {}
    for (text, _, method), off in errors(rows).items():
        if method == USUAL[text]:
            found = worst.setdefault(text, [0.0, 0.0])
            worst[text] = [max(one, *off[name]) for one, name in zip(found, off, strict=True)]
    parts = [
        f"{percent(total)} and {percent(tail)} on {text} (`{USUAL[text]}`)"
        for text, (total, tail) in worst.items()
    ]
    return (
        "With drafts predicted from other groups of the text, the simulator's total and tail time are off by"
        f" at most {', and '.join(parts)}."
    )
