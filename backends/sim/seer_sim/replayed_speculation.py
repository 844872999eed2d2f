"""Speculation on a simulated instance by a drafter that chooses token by token, on text that was replayed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from seer_core.ports.drafting import DraftPolicy
from seer_sim.cost import CostModel
from seer_sim.decode_cohort import TOKEN_UNIT, DecodeCohort, SimChunk
from seer_sim.draft_choice import choose, offers_of, together
from seer_sim.drafts import Drafts
from seer_sim.replayed import ReplayedDrafts
from seer_sim.speculation import Speculation

__all__ = ["ReplayedSpeculation"]


class ReplayedSpeculation(Speculation):
    """Drafts that are worth what they were in a replay; the cost model decides which ones a step verifies."""

    def __init__(
        self,
        policy: DraftPolicy,
        drafts: Drafts,
        replayed: ReplayedDrafts,
        draft_tokens: int,
        cost: CostModel,
    ) -> None:
        self._replayed = replayed
        self._cost = cost
        self._drafting_s = 0.0
        self._offers = [offers_of(text, draft_tokens) for text in replayed.texts]
        super().__init__(policy, drafts, draft_tokens)

    def cohort(self, run: SimChunk, block: int) -> DecodeCohort:
        """Return an empty cohort for the run's class."""
        return DecodeCohort(block, self.rates(run), run.job.probe, row=self._row(run))

    def draft(self, cohorts: Sequence[DecodeCohort], max_positions: int) -> None:
        """Let the batch verify what pays most, by the offers of its texts; none above ``max_positions``."""
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

    def drafting_s(self, cohorts: Sequence[DecodeCohort]) -> tuple[float, float]:
        """Return the seconds that drafting takes in the next step; later ones take as long."""
        return self._drafting_s, 0.0

    def learn(self, cohorts: Iterable[DecodeCohort], steps: int) -> None:
        """Report nothing: no policy is asked."""

    def _rows(self) -> Sequence[tuple[float, ...]]:
        return [text.accepted[0] for text in self._replayed.texts]

    def _row(self, run: SimChunk) -> int:
        job, stop = run.job, run.final_tokens - run.job.prompt_tokens
        start = stop - run.new_tokens
        gain = self._replayed.gain(
            job.request_id, job.group_id, run.response_tokens, start, stop, job.siblings_finished
        )
        return self._replayed.text_of(gain)
