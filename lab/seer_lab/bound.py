"""The least time that a workload could take under the simulator's cost model: a linear program.

The program chooses how many steps all instances make in each *bin* (so many requests, so much KV, with
drafts or without), and in which bins the tokens of each class of responses are written.  A step's time is
bounded from below by a line within each bin.  So the sums of any schedule over its bins meet the constraints,
and no schedule takes less.

Kept are KV times time, requests times time, a step's fixed costs, and that a response's tokens follow one
another: its own steps end before the makespan.  Answers of tools are context, computed once, and the tools'
seconds lie between a response's steps.  Left out are what can only add time: the computation of prompts,
whole blocks and chunks, moves, imbalance, and that lengths are not known in advance.  With drafts, a
response is as well off as if as many siblings had finished as its group has shorter responses, from its
first token on, so the bound with drafts is looser.  ``docs/explain/bound.md`` derives the program.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, zip_longest
from math import ceil
from typing import Any

import attrs
import msgspec
import numpy as np
from seer_host.tables import structure
from seer_sim.cost import CostModel
from seer_sim.drafts import Drafts
from seer_sim.plugin import Settings
from seer_sim.settings import cost_of

from seer_core.errors import SeerError
from seer_lab.lengths import GroupLengths
from seer_lab.policies import PolicySet
from seer_lab.response_classes import Responses
from seer_lab.shares import Shares
from seer_lab.workloads import Workload

__all__ = ["Bound", "Machine", "bounds_of", "lower_bound"]

GROUPED, VANILLA = "grouped_spec", "vanilla_sd"
POSITION_BINS, KV_BINS = 24, 8
"""Bins of a step's positions and of the KV in use, by powers; with drafts there are fewer."""
POSITION_BINS_OF_DRAFTS, KV_BINS_OF_DRAFTS = 10, 5
LEAST_KV_SHARE = 0.05
DRAFT_TOKENS = range(9)
"""Lengths of drafts that the program may choose, beside the longest that the table has."""
LESS_WORK = 1e-6
"""Weight of instances' time beside the makespan: of the schedules that take as long, the least busy one."""
CLASSES, SEGMENTS = 20, 6
"""Classes of responses by length, and parts of a response; with drafts, for each row of acceptance."""
CLASSES_OF_ROW, SEGMENTS_OF_DRAFTS = 4, 3


Term = tuple[int, float]
"""A variable and its factor."""


class Machine(msgspec.Struct, frozen=True):
    """The instances that the bound is for."""

    cost: CostModel
    instances: int
    kv_capacity_tokens: int
    max_running: int
    max_batched_tokens: int


class Bound(msgspec.Struct, frozen=True):
    """The least time of a workload on a machine."""

    total_time_s: float
    """No schedule of the workload takes less."""
    longest_s: float
    """The response that takes longest alone, at its fastest and with its tools; part of the bound."""
    shares: Shares
    """Of all instances' time, in the schedule that takes so long with the least work."""
    drafts: bool
    """Whether it drafts."""


class _Bin(msgspec.Struct, frozen=True):
    """Steps of ``least`` to ``most`` positions, with KV between two limits in use; drafting or not."""

    least: int
    most: int
    least_kv: float
    most_kv: float
    drafts: bool


def lower_bound(groups: Sequence[GroupLengths], machine: Machine, drafts: Drafts | None = None) -> Bound:
    """Return the least time in which the machine could write these responses.

    ``drafts`` are those of a drafter that learns from siblings; None is for no drafts.

    Raises:
        SeerError: the solver finds no solution; report it with the command.
    """
    return _Program(groups, machine, None if drafts is None else _at_best(drafts)).solve()


def bounds_of(
    workload: Workload, policies: Sequence[PolicySet], seeds: Iterable[int], overrides: Sequence[str] = ()
) -> dict[tuple[str, int], Bound]:
    """Return the bound by policy and seed: with drafts for a policy that drafts from siblings.

    There is none for policies with other drafts, for those that put responses off, and for drafts of turns,
    whose siblings end in another order than that of their lengths.
    """
    found = {}
    for seed in seeds:
        bounds: dict[tuple[Machine, bool], Bound] = {}
        for policy in policies:
            has_drafts = GROUPED in policy.plugins
            if policy.over_issue > 1 or (not has_drafts and VANILLA in policy.plugins):
                continue
            if has_drafts and workload.has_turns:
                continue
            config = workload.config(policy.plugins, (*policy.overrides, *overrides), seed)
            settings = structure(config.engine["sim"], Settings, "engine.sim")
            machine = Machine(
                cost_of(settings, "engine.sim"),
                settings.instances,
                settings.kv_capacity_tokens,
                settings.max_running,
                settings.max_batched_tokens,
            )
            key = machine, has_drafts
            if key not in bounds:
                drafts = settings.acceptance if has_drafts else None
                bounds[key] = lower_bound(workload.groups(seed), machine, drafts)
            found[policy.name, seed] = bounds[key]
    return found


def _at_best(drafts: Drafts) -> Drafts:
    """Return drafts whose rows are as good as every row before them, of which a response has each in turn."""
    rates: list[tuple[float, ...]] = []
    verified: list[tuple[float, ...]] = []
    best: tuple[float, ...] = ()
    least: tuple[float, ...] = ()
    for number, row in enumerate(drafts.table()):
        best = tuple(max(pair) for pair in zip_longest(best, row, fillvalue=0.0))
        rates.append(best)
        if drafts.verified is not None:
            shares = drafts.verified[number]
            least = tuple(min(pair) for pair in zip(least, shares, strict=False)) if number else shares
            verified.append(tuple(max(pair) for pair in zip_longest(best, least, fillvalue=0.0)))
    return msgspec.structs.replace(drafts, rates=tuple(rates), verified=tuple(verified) or None)


@attrs.define(eq=False)
class _Matrix:
    """Rows of a sparse matrix, and their right-hand sides."""

    rows: list[int] = attrs.Factory(list)
    columns: list[int] = attrs.Factory(list)
    values: list[float] = attrs.Factory(list)
    right: list[float] = attrs.Factory(list)

    def add(self, terms: Iterable[Term], right: float = 0.0) -> None:
        """Add a row."""
        for column, value in terms:
            self.rows.append(len(self.right))
            self.columns.append(column)
            self.values.append(value)
        self.right.append(right)


class _Program:
    """Variables: steps and KV of each bin; for each class, segment, bin and draft length, steps; the time."""

    def __init__(self, groups: Sequence[GroupLengths], machine: Machine, drafts: Drafts | None) -> None:
        self._cost, self._machine, self._drafts = machine.cost, machine, drafts
        self._segments = SEGMENTS if drafts is None else SEGMENTS_OF_DRAFTS
        self._responses = Responses.of(groups, drafts)
        self._classes = self._responses.classes(CLASSES if drafts is None else CLASSES_OF_ROW, self._segments)
        self._answer_tokens = float(self._responses.answer_tokens.sum())
        responses = len(self._responses.tokens)
        self._prompt = sum(group.prompt_tokens * len(group.output_tokens) for group in groups) / responses
        # A prompt is held once for all siblings that run together.
        self._held = sum(group.prompt_tokens for group in groups) / responses
        longest = 0 if drafts is None else len(drafts.table()[-1])
        self._lengths = sorted({*(tokens for tokens in DRAFT_TOKENS if tokens < longest), longest})
        # The least that drafting adds to a step that drafts.
        self._fixed_drafting_s = 0.0
        if drafts is not None:
            self._fixed_drafting_s = drafts.step_s * (
                1 - max(drafts.bare(each.row) for each in self._classes)
            )
        self._bins = list(self._make_bins())
        self._pairs = [
            (index, tokens)
            for index, each in enumerate(self._bins)
            for tokens in (self._lengths if each.drafts else [0])
        ]
        self._parts = [(each, segment) for each in self._classes for segment in range(self._segments)]
        self._at_most, self._equal = _Matrix(), _Matrix()
        self._work: list[Term] = []

    def solve(self) -> Bound:
        """Return the least time, with that of the longest response alone."""
        from scipy.optimize import linprog  # a third of a second
        from scipy.sparse import coo_matrix

        self._fill()
        variables = self._time + 1
        cost = np.zeros(variables)
        cost[self._time] = 1.0
        for column, seconds in self._work:
            cost[column] += LESS_WORK * seconds / self._machine.instances

        def matrix(rows: _Matrix) -> Any:
            shape = (len(rows.right), variables)
            return coo_matrix((rows.values, (rows.rows, rows.columns)), shape=shape).tocsr()

        found = linprog(
            cost,
            A_ub=matrix(self._at_most),
            b_ub=self._at_most.right,
            A_eq=matrix(self._equal),
            b_eq=self._equal.right,
            method="highs-ds",
        )
        if found.status != 0:
            raise SeerError(f"the solver found no bound: {found.message}")
        longest_s = self._longest_s()
        total_s = max(float(found.x[self._time]), longest_s)
        shares = self._shares(found.x.tolist(), total_s)
        # With the weight on work, the time is that much above the least at most.
        least_s = max(total_s / (1 + LESS_WORK), longest_s)
        return Bound(least_s, longest_s, shares, self._drafts is not None)

    @property
    def _prefill(self) -> int:
        """Where the positions of tools' answers begin, one variable for each bin if there are any."""
        return 2 * len(self._bins) + len(self._parts) * len(self._pairs)

    @property
    def _time(self) -> int:
        return self._prefill + (len(self._bins) if self._answer_tokens else 0)

    def _fill(self) -> None:
        """Write the constraints."""
        bins, machine, segments = self._bins, self._machine, self._segments
        token_s = self._cost.attention_s(1)
        spent = self._work
        positions: list[list[Term]] = [[] for _ in bins]
        requests: list[list[Term]] = [[] for _ in bins]
        least_kv: list[list[Term]] = [[] for _ in bins]
        most_kv: list[list[Term]] = [[] for _ in bins]
        all_kv: list[Term] = []
        lines = [self._line(each) for each in bins]
        for index, (fixed_s, _) in enumerate(lines):
            spent += [(index, fixed_s), (len(bins) + index, token_s)]
        paths: dict[int, list[Term]] = {}
        for part, (each, segment) in enumerate(self._parts):
            tokens = each.tokens / segments
            context = each.parts[segment]
            path = paths.setdefault(part // segments, [(self._time, -1.0)])
            written: list[Term] = []
            for pair, (index, drafted) in enumerate(self._pairs):
                column = 2 * len(bins) + part * len(self._pairs) + pair
                computed, gain = self._drafted(each.row, drafted)
                written.append((column, gain))
                positions[index].append((column, each.count * computed))
                requests[index].append((column, float(each.count)))
                least_kv[index].append((column, each.count * (context.least + self._held)))
                most_kv[index].append((column, each.count * (context.most + self._held)))
                all_kv.append((column, each.count * (context.mean + self._held)))
                attention_s = self._cost.attention_s(computed)
                more_s = (attention_s - token_s) * (context.least + self._prompt) + computed * attention_s
                own_s = lines[index][1] * computed + self._cost.request_s + self._drafting_s(drafted)
                own_s += token_s * (self._prompt - self._held) + more_s
                spent.append((column, each.count * own_s))
                path.append((column, self._step_s(bins[index], computed, drafted, context.least)))
            self._equal.add(written, tokens)
        if self._answer_tokens:
            for index, (_, slope) in enumerate(lines):
                positions[index].append((self._prefill + index, 1.0))
                spent.append((self._prefill + index, slope - self._cost.sampled_s))
            self._equal.add([(self._prefill + index, 1.0) for index in range(len(bins))], self._answer_tokens)
        add = self._at_most.add
        for steps, limits in enumerate(bins):
            index, kv = steps, len(bins) + steps
            add([*positions[index], (steps, -float(limits.most))])
            add([*_negative(positions[index]), (steps, float(limits.least))])
            add([*requests[index], (steps, -float(machine.max_running))])
            add([(kv, 1.0), (steps, -limits.most_kv)])
            add([(kv, -1.0), (steps, limits.least_kv)])
            add([*least_kv[index], (kv, -1.0)])
            add([*_negative(most_kv[index]), (kv, 1.0)])
        add([*all_kv, *((len(bins) + index, -1.0) for index in range(len(bins)))])
        add([(self._time, -float(machine.instances)), *spent])
        for number, path in paths.items():
            if self._drafts is None or self._classes[number].is_last:
                add(path, -self._classes[number].tools_s)

    def _shares(self, found: Sequence[float], total_s: float) -> Shares:
        """Return what the steps that the program chose are spent on."""
        cost, bins = self._cost, self._bins
        positions = [0.0] * len(bins)
        requests_s = drafts_s = prefill_s = 0.0
        for part, (each, _) in enumerate(self._parts):
            for pair, (index, drafted) in enumerate(self._pairs):
                steps = each.count * max(0.0, found[2 * len(bins) + part * len(self._pairs) + pair])
                positions[index] += steps * self._drafted(each.row, drafted)[0]
                requests_s += steps * cost.request_s
                drafts_s += steps * self._drafting_s(drafted)
        floor_s = 0.0
        filled = found[self._prefill : self._time] or [0.0] * len(bins)
        for limits, steps, computed, answered in zip(bins, found, positions, filled, strict=False):
            if steps > 0:
                computed += answered
                fixed_s, slope = self._line(limits)
                drafting_s = steps * self._fixed_drafting_s if limits.drafts else 0.0
                line_s = steps * fixed_s - drafting_s + slope * computed - cost.sampled_s * answered
                least_s = min(line_s, steps * (cost.overhead_s + cost.weights_s(computed / steps)))
                floor_s += least_s
                more_s = line_s - least_s
                sampling_s = cost.sampled_s * (computed - answered)
                answers_s = max(0.0, more_s - sampling_s) * answered / computed if answered > 0 else 0.0
                prefill_s += answers_s
                requests_s += more_s - answers_s
                drafts_s += drafting_s
        work_s = sum(found[column] * seconds for column, seconds in self._work)
        all_s = total_s * self._machine.instances
        return Shares(
            floor=floor_s / all_s,
            attention=(work_s - floor_s - requests_s - prefill_s - drafts_s) / all_s,
            requests=requests_s / all_s,
            prefill=prefill_s / all_s,
            drafts=drafts_s / all_s,
            idle=max(0.0, 1 - work_s / all_s),
        )

    def _make_bins(self) -> Iterator[_Bin]:
        """Yield bins that cover all steps; positions are divided where layers turn from memory to FLOPs."""
        machine = self._machine
        capacity = float(machine.kv_capacity_tokens)
        few = self._drafts is not None
        kv_bins = KV_BINS_OF_DRAFTS if few else KV_BINS
        kv = [0.0, *(capacity * share for share in np.geomspace(LEAST_KV_SHARE, 1.0, kv_bins))]
        position_bins = POSITION_BINS_OF_DRAFTS if few else POSITION_BINS
        for drafts in (False, True)[: 1 if self._drafts is None else 2]:
            computed = max(self._drafted(each.row, self._lengths[-1])[0] for each in self._classes)
            most = ceil(machine.max_running * (computed if drafts else 1))
            if self._answer_tokens:
                most = max(most, machine.max_batched_tokens)
            edges = {1, most + 1, min(most + 1, _knee(self._cost, most))}
            edges |= {round(each) for each in np.geomspace(1, most + 1, position_bins)}
            for least, after in pairwise(sorted(edges)):
                for least_kv, most_kv in pairwise(kv):
                    yield _Bin(least, after - 1, least_kv, most_kv, drafts)

    def _drafted(self, row: int, drafted: int) -> tuple[float, float]:
        """Return the positions that a request computes in a step, and the tokens that it gets."""
        if self._drafts is None or not drafted:
            return 1.0, 1.0
        return self._drafts.positions(row, drafted), 1.0 + sum(self._drafts.table()[row][:drafted])

    def _line(self, each: _Bin) -> tuple[float, float]:
        """Return the height and slope, over positions, of a line below a step's time in a bin."""
        seconds = [self._cost.pass_s(positions, 0, positions) for positions in (each.least, each.most)]
        slope = 0.0 if each.least == each.most else (seconds[1] - seconds[0]) / (each.most - each.least)
        height = min(
            self._cost.pass_s(positions, 0, positions) - slope * positions
            for positions in range(each.least, each.most + 1)
        )
        return height + (self._fixed_drafting_s if each.drafts else 0.0), slope

    def _drafting_s(self, drafted: int) -> float:
        return self._drafts.request_s if self._drafts is not None and drafted else 0.0

    def _step_s(self, each: _Bin, computed: float, drafted: int, context: float) -> float:
        """Return the least time of a step in a bin for a request that is at ``context`` tokens at least."""
        positions = max(each.least, computed)
        seconds = self._cost.pass_s(positions, 1, positions) + self._drafting_s(drafted)
        seconds += self._cost.attention_s(computed) * max(each.least_kv, context + self._prompt)
        return seconds + (self._fixed_drafting_s if each.drafts else 0.0)

    def _longest_s(self) -> float:
        """Return the least time of the response that takes longest alone on an instance, with its tools."""
        found = self._responses
        # With drafts the longest alone is looked at, by the least acceptance that one so long has.
        last = int(np.lexsort((-found.rows, found.tokens))[-1])
        longest = slice(None) if self._drafts is None else slice(last, last + 1)
        row = int(found.rows[longest][0])
        times = []
        for drafted in self._lengths:
            computed, gain = self._drafted(row, drafted)
            step_s = self._cost.pass_s(computed, 1, computed) + self._drafting_s(drafted)
            step_s += self._fixed_drafting_s if drafted else 0.0
            contexts = self._prompt + found.mean_contexts[longest]
            steps_s = step_s + self._cost.attention_s(computed) * contexts
            times.append(float((found.tokens[longest] / gain * steps_s + found.tools_s[longest]).max()))
        return min(times)


def _knee(cost: CostModel, most: int) -> int:
    """Return the first number of positions that take longer to compute than the weights take to read."""

    def computes(positions: int) -> bool:
        return cost.layer_s * positions >= cost.weights_s(positions)

    return bisect_left(range(1, most + 1), True, key=computes) + 1


def _negative(terms: Sequence[Term]) -> Iterator[Term]:
    return ((column, -value) for column, value in terms)
