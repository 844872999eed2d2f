"""Speculation on a simulated instance: it asks the drafter's policy and reports acceptance to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from seer_core.ports.drafting import DraftPolicy
from seer_sim.cost import CostModel
from seer_sim.decode_cohort import TOKEN_UNIT, DecodeCohort
from seer_sim.draft_choice import choose, offers_of, together
from seer_sim.drafts import Class, Drafts
from seer_sim.run import SimChunk

__all__ = ["Speculation"]


class Speculation:
    """A policy, and what its drafts are worth and take; none is longer than ``draft_tokens``."""

    def __init__(self, policy: DraftPolicy, drafts: Drafts, draft_tokens: int, cost: CostModel) -> None:
        self._policy = policy
        self.drafts = drafts
        self._cost = cost
        self._drafting_s: float | None = None
        if drafts.replayed is None:
            self._table = [row[:draft_tokens] for row in drafts.table()]
        else:
            self._table = [text.accepted[0][:draft_tokens] for text in drafts.replayed.texts]
            self._offers = [offers_of(text, draft_tokens) for text in drafts.replayed.texts]

    def class_of(self, run: SimChunk) -> tuple[bool, int]:
        """Return the class whose runs move in step: probe or not, and a row of the table."""
        return run.job.probe, self._row(run)

    def rates(self, run: SimChunk) -> tuple[float, ...]:
        """Return the probabilities that drafts for the run are accepted up to position 1, 2, ..."""
        return self._table[self._row(run)]

    def cohort(self, run: SimChunk, block: int) -> DecodeCohort:
        """Return an empty cohort for the run's class."""
        rates, row = self.rates(run), self._row(run)
        if self.drafts.replayed is not None:
            return DecodeCohort(block, rates, run.job.probe, row=row)
        positions_at = [self.drafts.positions(row, tokens) for tokens in range(len(rates) + 1)]
        return DecodeCohort(block, rates, run.job.probe, positions_at, self.drafts.bare(row))

    def _row(self, run: SimChunk) -> int:
        replayed = self.drafts.replayed
        if replayed is None:
            return self.drafts.row(run.job.siblings_finished, run.middle)
        stop = run.final_tokens - run.job.prompt_tokens
        job, tokens = run.job, run.response_tokens
        return replayed.text_of(job.request_id, job.group_id, tokens, stop - run.new_tokens, stop)

    def draft(self, cohorts: Sequence[DecodeCohort], max_positions: int) -> None:
        """Set the draft lengths of the next steps; none where all drafts would exceed ``max_positions``."""
        if self.drafts.replayed is not None:
            self._choose(cohorts, max_positions)
            return
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
        if self._drafting_s is not None:
            return self._drafting_s, 0.0
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

    def _choose(self, cohorts: Sequence[DecodeCohort], max_positions: int) -> None:
        """Let the batch verify what pays most, by the offers of its texts."""
        batch, context = 0, 0
        for cohort in cohorts:
            batch += cohort.size
            context += cohort.context
        attention_s = context / TOKEN_UNIT * self._cost.attention_s(1)
        plain_s = self._cost.pass_s(batch, batch, batch) + attention_s
        offers, seconds, spent = [], [], []
        for level in range(len(self._offers[0])):
            offer = together([(cohort.size, self._offers[cohort.row][level]) for cohort in cohorts])
            positions = batch + self.drafts.paths * offer.verified
            if positions > max_positions:
                continue
            offers.append(offer)
            spent.append(self.drafts.step_s + self.drafts.request_s * offer.drafting)
            seconds.append(self._cost.pass_s(positions, batch, positions) + attention_s + spent[-1])
        chosen = choose(batch, offers, plain_s, seconds)
        if chosen is None:
            self._drafting_s = 0.0
            for cohort in cohorts:
                cohort.verify(0.0, 0.0)
            return
        level = chosen.level + len(self._offers[0]) - len(offers)
        self._drafting_s = spent[chosen.level] * chosen.share
        for cohort in cohorts:
            offer = self._offers[cohort.row][level]
            cohort.verify(self.drafts.paths * offer.verified * chosen.share, offer.accepted * chosen.part)

    def learn(self, cohorts: Iterable[DecodeCohort], steps: int) -> None:
        """Report to the policy what ``steps`` steps verified, and what of it was accepted in expectation."""
        drafting = [cohort for cohort in cohorts if cohort.draft_tokens and cohort.size]
        if not drafting or self.drafts.replayed is not None:
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
