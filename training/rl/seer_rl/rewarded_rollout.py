"""A rollout whose rewards are computed while it goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import attrs

from seer_core import Completion, PromptGroup, Session
from seer_core.ports.journal import Journal
from seer_rl.errors import RewardError, TrainError
from seer_rl.phases import ProgressListener
from seer_rl.responses import Response
from seer_rl.rewards import RewardPool
from seer_rl.scoring import FinishedResponse

__all__ = ["RewardedRollout"]


@attrs.frozen(eq=False)
class RewardedRollout:
    """Rolls prompts out through a session, and submits each response that finishes for its reward."""

    session: Session
    rewards: RewardPool
    listener: ProgressListener

    def run(
        self, prompts: Iterable[Mapping[str, Any]], iteration: int, journal: Journal | None = None
    ) -> list[FinishedResponse]:
        """Return every response, in the order of submission; seeds follow from the iteration.

        What the ``journal`` has of them is not computed again.

        Raises:
            TrainError: a prompt is sampled in a way that cannot be trained on.
            InputError: the journal has other prompts, or those of other weights.
            SeerError: the rollout failed.
        """
        records = list(prompts)
        groups = self.session.runtime.groups(records, iteration)
        _check_sampling(groups)
        wanted = sum(group.n for group in groups)
        found: dict[tuple[str, int], tuple[Completion, Future[float]]] = {}
        for completion in self.session.stream(records, iteration, keep=False, journal=journal):
            found[completion.group_id, completion.index] = completion, self._reward(completion)
            self.listener.responses(len(found), wanted)
        return [
            FinishedResponse(group, *found[group.id, index]) for group in groups for index in range(group.n)
        ]

    def speeds(self) -> dict[str, Any]:
        """Return metrics of how the latest rollout went, which depend on how it was scheduled."""
        summary = self.session.result.summary
        return {
            "tokens_per_s": round(summary.throughput_tokens_per_s, 1),
            "tail_s": round(summary.tail_time_s, 3),
            "chunks": summary.chunks,
            "preemptions": summary.preemptions,
            "instances_lost": summary.instances_lost,
            "resumed_tokens": summary.resumed_tokens,
            "acceptance_length": round(summary.acceptance_length, 3),
        }

    def _reward(self, completion: Completion) -> Future[float]:
        if completion.whole:
            return self.rewards.submit(
                Response(
                    completion.metadata,
                    completion.text,
                    list(completion.token_ids),
                    completion.finish_reason,
                )
            )
        none: Future[float] = Future()
        none.set_exception(RewardError(f"it ended with {completion.finish_reason!r}"))
        return none


def _check_sampling(groups: Sequence[PromptGroup]) -> None:
    for group in groups:
        sampling = group.sampling
        if not sampling.raw:
            raise TrainError(
                f"group {group.id!r} is sampled by {sampling.described}: the log-probs that are trained on"
                " are the model's own; sample at temperature 1, top_p 1 and top_k 0"
            )
