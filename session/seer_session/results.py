"""The result of a rollout: its completions, and the statistics that users compare."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

import msgspec

from seer_core.model.events import (
    Event,
    InstanceDegraded,
    InstanceFailed,
    InstanceLost,
    InstanceReported,
    InstanceStarted,
)
from seer_core.model.requests import Completion, Exactness, InstanceInfo

__all__ = ["RolloutResult", "Summary", "Tally", "tail_requests", "tail_time_s"]

LEAST_FIRST: tuple[Exactness, ...] = ("distributed", "reproducible", "exact")

TAIL_FRACTION = 0.1
"""Share of requests, last to finish, that make the tail (paper, evaluation)."""


class Summary(msgspec.Struct, frozen=True):
    """Statistics of a rollout; times are in seconds on the run's clock, tokens are output tokens."""

    requests: int
    """The responses that are over."""
    groups: int
    """The prompt groups that these are of."""
    tokens: int
    """The tokens of all responses."""
    total_time_s: float
    """The time from the start to the end of the last response."""
    tail_time_s: float
    """The time spent solely on the last tenth of the requests to finish."""
    throughput_tokens_per_s: float
    """The tokens that this process computed, over the total time."""
    mean_tokens: float
    """The mean length of a response."""
    max_tokens: int
    """The longest response."""
    chunks: int
    """The chunks that finished."""
    migrations: int
    """The chunks that ran on another instance than the one before."""
    preemptions: int
    """How often engines preempted chunks."""
    cached_tokens: int
    """Context tokens whose KV the instances' own caches had."""
    prefilled_tokens: int
    """Context tokens that were computed before a chunk's first new one."""
    recomputed_tokens: int
    """The positions that ran through the model a second time, because KV was evicted, preempted, left behind
    or lost.
    """
    instances_lost: int
    """How often an instance was lost."""
    finish_reasons: dict[str, int]
    """How many responses ended for each reason."""
    weight_version: int
    """The version of the weights."""
    steps: int = 0
    """The engine steps that gave tokens, summed over requests."""
    drafted_tokens: int = 0
    """The draft tokens that were verified."""
    accepted_tokens: int = 0
    """The draft tokens that were accepted."""
    acceptance_length: float = 0.0
    """The tokens per step and request, the bonus token included (paper, and arXiv 2211.17192)."""
    acceptance_at: list[float] = []
    """The share at index j is of drafts of at least j + 1 tokens that were accepted that far."""
    drafting_share: float = 0.0
    """The part of the engines' step time that was spent on drafts."""
    pool_tokens: int = 0
    """Context tokens whose KV came from the pool."""
    overrun_share: float = 0.0
    """The part by which steps that emulate an accelerator in real time took longer than they should have, on
    the instance where it is largest.
    """
    degradations: dict[str, int] = {}
    """How many parts of instances failed, by part: in this rollout, or before it if the instance was not
    restarted since.
    """
    instances_failed: int = 0
    """The instances that are down for good: lost too often, in this rollout or before it."""
    observers_failed: int = 0
    """The observers that raised, and were not called from then on."""
    resumed_tokens: int = 0
    """The part of ``tokens`` that an earlier process wrote, which throughput leaves out."""
    turns: int = 0
    """The turns that an environment answered."""
    environment_tokens: int = 0
    """The part of ``tokens`` that environments answered, which throughput leaves out."""
    environment_s: float = 0.0
    """The time from the ends of turns to their answers, summed over turns."""
    exactness: Exactness = "exact"
    """The least that an instance's tokens depended on requests' seeds and their places alone."""
    quantization: list[str] = []
    """The formats in which instances had quantised weights; their log-probs are those of such weights."""


class RolloutResult(msgspec.Struct, frozen=True):
    """All completions of a rollout, in order of their finish, and its statistics."""

    completions: list[Completion]
    """All completions, in order of their finish."""
    summary: Summary
    """The rollout's statistics."""

    def in_order(self, names: Iterable[tuple[str, int]]) -> list[Completion]:
        """Return the completions of these groups and indices, in their order.

        Raises:
            KeyError: one is missing.
        """
        found = {(each.group_id, each.index): each for each in self.completions}
        return [found[name] for name in names]

    def __repr__(self) -> str:  # asyncio.run shows its result to the signal module: all tokens, in seconds
        return f"<RolloutResult of {len(self.completions)} completions>"


def tail_requests(requests: int) -> int:
    """Return how many of so many requests, the last to finish, are the tail."""
    return int(requests * TAIL_FRACTION)


def tail_time_s(finish_times_s: Sequence[float]) -> float:
    """Return the time spent solely on the last tenth of the requests to finish."""
    times = sorted(finish_times_s)
    if not times:
        return 0.0
    early = len(times) - tail_requests(len(times))
    return times[-1] - times[early - 1]


class Tally:
    """Adds a rollout up while it runs, so that completions need not be kept.

    It began at ``started_s``, when ``reports`` were the instances' last ones, with ``degradations`` since
    their starts, and ``instances_failed`` were down for good.  ``instances`` are those alive.
    """

    def __init__(
        self,
        started_s: float,
        reports: Mapping[str, InstanceReported] = {},
        degradations: Mapping[str, Sequence[InstanceDegraded]] = {},
        instances_failed: int = 0,
        instances: Iterable[InstanceInfo] = (),
    ) -> None:
        self.started_s = started_s
        self._reports_before = dict(reports)
        self._reports = dict(reports)
        self._degradations = Counter(
            degradation.what for since_start in degradations.values() for degradation in since_start
        )
        self._instances_failed = instances_failed
        alive = list(instances)
        self._exactness = {info.exactness for info in alive}
        self._quantization = {info.quantization for info in alive}
        self._instances_lost = 0
        self._groups: set[str] = set()
        self._groups_over = 0
        self._finishes_s = array("d")
        self._tokens = self._max_tokens = self._resumed_tokens = 0
        self._turns = self._environment_tokens = self._answered_tokens = 0
        self._environment_s = 0.0
        self._finish_reasons: Counter[str] = Counter()
        self._chunks = self._migrations = self._preemptions = 0
        self._cached = self._prefilled = self._recomputed = self._pooled = 0
        self._steps = self._stepped = 0
        self._drafted: list[int] = []
        self._accepted: list[int] = []

    @property
    def requests(self) -> int:
        """Requests that are over."""
        return len(self._finishes_s)

    def see(self, event: Event) -> None:
        """Count an event of an instance."""
        match event:
            case InstanceReported():
                self._reports[event.instance_id] = event
            case InstanceStarted():
                self._exactness.add(event.info.exactness)
                self._quantization.add(event.info.quantization)
                self._reports.pop(event.info.id, None)
                self._reports_before.pop(event.info.id, None)
            case InstanceLost():
                self._instances_lost += 1
            case InstanceFailed():
                self._instances_failed += 1
            case InstanceDegraded():
                self._degradations[event.what] += 1

    def add(self, completion: Completion, group_over: bool = False, resumed_tokens: int = 0) -> None:
        """Count a completion; ``group_over``: it was its group's last."""
        tokens = len(completion.token_ids)
        self._resumed_tokens += resumed_tokens
        self._groups.add(completion.group_id)
        if group_over:
            self._groups.remove(completion.group_id)
            self._groups_over += 1
        self._finishes_s.append(completion.finished_s)
        self._tokens += tokens
        self._max_tokens = max(self._max_tokens, tokens)
        self._finish_reasons[completion.finish_reason] += 1
        position = 0
        for turn in completion.turns:
            position += turn.tokens
            if turn.environment_s is not None:
                self._turns += 1
                self._environment_s += turn.environment_s
            self._environment_tokens += turn.answer_tokens
            self._answered_tokens += turn.answer_tokens if position >= resumed_tokens else 0
            position += turn.answer_tokens
        before = None
        migrations = preemptions = cached = prefilled = recomputed = pooled = steps = stepped = 0
        for chunk in completion.chunks:
            instance = chunk.instance
            if instance != before:
                migrations += before is not None
                before = instance
            preemptions += chunk.preemptions
            cached += chunk.cached_tokens
            prefilled += chunk.prefilled_tokens
            recomputed += chunk.recomputed_tokens
            pooled += chunk.pool_tokens
            if chunk.steps:
                steps += chunk.steps
                stepped += chunk.tokens
            if chunk.drafted_at:
                self._drafted = _sum(self._drafted, chunk.drafted_at)
                self._accepted = _sum(self._accepted, chunk.accepted_at)
        self._chunks += len(completion.chunks)
        self._migrations += migrations
        self._preemptions += preemptions
        self._cached += cached
        self._prefilled += prefilled
        self._recomputed += recomputed
        self._pooled += pooled
        self._steps += steps
        self._stepped += stepped

    def summary(self, weight_version: int = 0, observers_failed: int = 0) -> Summary:
        """Return the statistics as they are now."""
        requests = self.requests
        total = max(self._finishes_s, default=self.started_s) - self.started_s
        computed = self._tokens - self._resumed_tokens - self._answered_tokens
        return Summary(
            requests=requests,
            groups=self._groups_over + len(self._groups),
            tokens=self._tokens,
            total_time_s=total,
            tail_time_s=tail_time_s(self._finishes_s),
            throughput_tokens_per_s=computed / total if total else 0.0,
            mean_tokens=self._tokens / requests if requests else 0.0,
            max_tokens=self._max_tokens,
            chunks=self._chunks,
            migrations=self._migrations,
            preemptions=self._preemptions,
            cached_tokens=self._cached,
            prefilled_tokens=self._prefilled,
            recomputed_tokens=self._recomputed,
            instances_lost=self._instances_lost,
            finish_reasons=dict(self._finish_reasons),
            weight_version=weight_version,
            steps=self._steps,
            drafted_tokens=sum(self._drafted),
            accepted_tokens=sum(self._accepted),
            acceptance_length=self._stepped / self._steps if self._steps else 0.0,
            acceptance_at=[a / d for a, d in zip(self._accepted, self._drafted, strict=True) if d],
            drafting_share=self._drafting_share(),
            pool_tokens=self._pooled,
            overrun_share=max(map(self._overrun_share, self._reports.values()), default=0.0),
            degradations=dict(self._degradations),
            instances_failed=self._instances_failed,
            observers_failed=observers_failed,
            resumed_tokens=self._resumed_tokens,
            turns=self._turns,
            environment_tokens=self._environment_tokens,
            environment_s=self._environment_s,
            exactness=next((each for each in LEAST_FIRST if each in self._exactness), "exact"),
            quantization=sorted(self._quantization - {""}),
        )

    def _drafting_share(self) -> float:
        """Return the share of the engines' stepping time since the start that was spent on drafts."""
        stepping = drafting = 0.0
        for name, report in self._reports.items():
            before = self._reports_before.get(name) or InstanceReported(name, 0, 0, 0.0)
            stepping += report.stepping_s - before.stepping_s
            drafting += report.drafting_s - before.drafting_s
        return drafting / stepping if stepping else 0.0

    def _overrun_share(self, report: InstanceReported) -> float:
        """Return by what part an instance's steps took longer than they should have."""
        before = self._reports_before.get(report.instance_id) or InstanceReported("", 0, 0, 0.0)
        emulated_s = report.emulated_s - before.emulated_s
        return max(0.0, report.overrun_s - before.overrun_s) / emulated_s if emulated_s else 0.0


def _sum(*counts: Sequence[int]) -> list[int]:
    return [sum(each) for each in zip_longest(*counts, fillvalue=0)]
