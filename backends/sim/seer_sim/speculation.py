"""Speculation on a simulated instance: it asks the drafter's policy and reports acceptance to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from seer_core.ports.drafting import DraftPolicy
from seer_sim.decode_cohort import TOKEN_UNIT, DecodeCohort, SimChunk
from seer_sim.drafts import Class, Drafts

__all__ = ["Speculation"]


class Speculation:
    """A policy, and what its drafts are worth and take; none is longer than ``draft_tokens``."""

    def __init__(self, policy: DraftPolicy, drafts: Drafts, draft_tokens: int) -> None:
        self._policy = policy
        self.drafts = drafts
        self._table = [row[:draft_tokens] for row in self._rows()]

    def _rows(self) -> Sequence[tuple[float, ...]]:
        return self.drafts.table()

    def class_of(self, run: SimChunk) -> tuple[bool, int]:
        """Return the class whose runs move in step: probe or not, and a row of the table."""
        return run.job.probe, self._row(run)

    def rates(self, run: SimChunk) -> tuple[float, ...]:
        """Return the probabilities that drafts for the run are accepted up to position 1, 2, ..."""
        return self._table[self._row(run)]

    def cohort(self, run: SimChunk, block: int) -> DecodeCohort:
        """Return an empty cohort for the run's class."""
        rates, row = self.rates(run), self._row(run)
        positions_at = [self.drafts.positions(row, tokens) for tokens in range(len(rates) + 1)]
        return DecodeCohort(block, rates, run.job.probe, positions_at, self.drafts.bare(row))

    def _row(self, run: SimChunk) -> int:
        return self.drafts.row(run.job.siblings_finished, run.middle)

    def draft(self, cohorts: Sequence[DecodeCohort], max_positions: int) -> None:
        """Set the draft lengths of the next steps; none where all drafts would exceed ``max_positions``."""
        probes = others = 0
        for cohort in cohorts:
            if cohort.probe:
                probes += cohort.size
            else:
                others += cohort.size
        if self.drafts.verified is None:
            ours, theirs = self._policy.lengths(probes, others)
        else:  # how long drafts were is recorded as well
            ours = theirs = len(self._table[0])
        paths = self.drafts.paths
        if probes * (1 + paths * ours) + others * (1 + paths * theirs) > max_positions:
            ours = theirs = 0
        for cohort in cohorts:
            tokens = ours if cohort.probe else theirs
            if tokens != cohort.draft_tokens:
                cohort.draft(tokens)

    def drafting_s(self, cohorts: Sequence[DecodeCohort]) -> tuple[float, float]:
        """Return the seconds that drafting takes in the next step, and how many more in each later one."""
        drafting = [each for each in cohorts if each.draft_tokens]
        if not drafting:
            return 0.0, 0.0
        here = [
            Class(each.size, each.draft_tokens, each.context / TOKEN_UNIT, each.bare**each.size)
            for each in drafting
        ]
        fixed_s, reading_s = self.drafts.seconds(here)
        if not reading_s:
            return fixed_s, 0.0
        growth = [
            Class(each.size, each.draft_tokens, each.size * each.rate / TOKEN_UNIT) for each in drafting
        ]
        return fixed_s + reading_s, self.drafts.seconds(growth)[1]

    def learn(self, cohorts: Iterable[DecodeCohort], steps: int) -> None:
        """Report to the policy what ``steps`` steps verified, and what of it was accepted in expectation."""
        drafting = [cohort for cohort in cohorts if cohort.draft_tokens and cohort.size]
        if not drafting:
            return
        longest = max([cohort.draft_tokens for cohort in drafting])
        drafted = [0.0] * longest
        accepted = [0.0] * longest
        for cohort in drafting:
            drafts = cohort.size * steps
            drafted[cohort.draft_tokens - 1] += drafts
            for position, rate in enumerate(cohort.rates[: cohort.draft_tokens]):
                accepted[position] += drafts * rate
        for position in range(longest - 1, 0, -1):  # a draft that ends there has been through all before
            drafted[position - 1] += drafted[position]
        self._policy.record_acceptance(drafted, accepted)
