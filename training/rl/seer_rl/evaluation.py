"""Evaluation on held-out prompts, which are rolled out with the same seeds each time."""

from __future__ import annotations

import math
from typing import Any

import attrs

from seer_rl.journals import RolloutJournals
from seer_rl.phases import Phases
from seer_rl.prompts import Prompts
from seer_rl.rewarded_rollout import RewardedRollout
from seer_rl.scoring import FinishedResponse, failures, score, scored_only

__all__ = ["Evaluation"]


@attrs.define(eq=False)
class Evaluation:
    """Rolls held-out prompts out, where there are any, and reports their rewards later."""

    prompts: Prompts | None
    rollout: RewardedRollout
    journals: RolloutJournals
    phases: Phases
    _pending: list[tuple[int, list[FinishedResponse]]] = attrs.field(factory=list, init=False)

    def roll_out(self, iteration: int) -> None:
        """Roll out by the current weights; the next rollout can begin while the rewards are computed."""
        if self.prompts is None:
            return
        # The ids differ from those of any iteration: KV pools and drafters remember groups by id.
        records = [
            {**record, "group_id": f"held-out-{number}"} for number, record in enumerate(self.prompts(0))
        ]
        version = self.rollout.session.weight_version
        with self.phases.phase("evaluation"), self.journals.open(iteration, version) as journal:
            self._pending.append((version, self.rollout.run(records, 0, journal)))

    def results(self, iteration: int) -> list[dict[str, Any]]:
        """Return how the weights did that were evaluated since the last call, once all rewards are there.

        Raises:
            TrainError: no response of an evaluation has a reward.
        """
        pending, self._pending = self._pending, []
        return [self._result(iteration, *each) for each in pending]

    def _result(self, iteration: int, version: int, finished: list[FinishedResponse]) -> dict[str, Any]:
        with self.phases.phase("evaluation"):
            scored = score(finished)
        rewards = [each.reward for each in scored_only(scored, iteration) if each.reward is not None]
        lengths = [len(each.completion.token_ids) for each in scored]
        return {
            "weight_version": version,
            "reward_mean": math.fsum(rewards) / len(rewards),
            "mean_tokens": sum(lengths) / len(lengths),
            **failures(scored),
        }
