"""A rollout whose rewards are computed while it goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import attrs
import msgspec
from seer_host.images import PlacedImages
from seer_session import Completion, PromptGroup, Session
from seer_session.environment import Environment
from seer_session.journal import Journal

from seer_rl.errors import RewardError, TrainError
from seer_rl.phases import ProgressListener
from seer_rl.responses import Response
from seer_rl.rewards import RewardPool, flaw_of_reward
from seer_rl.scoring import FinishedResponse

__all__ = ["RewardedRollout"]


@attrs.frozen(eq=False)
class RewardedRollout:
    """Rolls prompts out through a session, and submits each response that finishes for its reward.

    Without ``rewards`` its reward is that of its environment: 0 where that gave none.
    """

    session: Session
    rewards: RewardPool | None
    listener: ProgressListener
    environment: Environment | None = None
    """It answers the turns of responses; None leaves that to the session's configuration."""
    takes_images: bool = False
    """Whether the trainer shows its model the images of prompts."""

    def run(
        self, prompts: Iterable[Mapping[str, Any]], iteration: int, journal: Journal | None = None
    ) -> list[FinishedResponse]:
        """Return every response, in the order of submission; seeds follow from the iteration.

        What the ``journal`` has of them is not computed again.

        Raises:
            TrainError: a prompt has images that the trainer does not take, or is sampled in a way that cannot
                be trained on.
            InputError: the journal has other prompts, or those of other weights.
            SeerError: the rollout failed.
        """
        records = list(prompts)
        groups = self.session.runtime.groups(records, iteration)
        self._check(groups)
        wanted = sum(group.n for group in groups)
        found: dict[tuple[str, int], tuple[Completion, Future[float]]] = {}
        stream = self.session.stream(
            records, iteration, keep=False, journal=journal, environment=self.environment
        )
        for completion in stream:
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
            "quantization": summary.quantization,
            "environment_s": round(summary.environment_s, 3),
        }

    def _reward(self, completion: Completion) -> Future[float]:
        if completion.whole and self.rewards is not None:
            return self.rewards.submit(
                Response(
                    completion.metadata,
                    completion.text,
                    list(completion.token_ids),
                    completion.finish_reason,
                    [msgspec.structs.replace(turn, environment_s=None) for turn in completion.turns],
                    completion.reward,
                )
            )
        found: Future[float] = Future()
        if not completion.whole:
            found.set_exception(
                RewardError(completion.error or f"it ended with {completion.finish_reason!r}")
            )
        elif flaw := flaw_of_reward(completion.reward or 0.0):
            found.set_exception(RewardError(f"the reward of its environment is refused: {flaw}"))
        else:
            found.set_result(completion.reward or 0.0)
        return found

    def _check(self, groups: Sequence[PromptGroup]) -> None:
        for group in groups:
            if isinstance(group.attachments, PlacedImages) and not self.takes_images:
                raise TrainError(
                    f"group {group.id!r} has images, which this trainer does not show its model; leave them"
                    ' out, or use trainer = "torch" with a model that takes images'
                )
            sampling = group.sampling
            if not sampling.raw:
                raise TrainError(
                    f"group {group.id!r} is sampled by {sampling.described}: the log-probs that are trained"
                    " on are the model's own; sample at temperature 1, top_p 1 and top_k 0"
                )
