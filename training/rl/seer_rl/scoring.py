"""Responses and their rewards: waited for, counted, and made into what a trainer learns from."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import structlog
from seer_host.images import PlacedImages
from seer_host.routed_experts import routed_experts

from seer_core import Completion, PromptGroup
from seer_core.errors import EngineError
from seer_rl.advantages import group_advantages
from seer_rl.errors import RewardError, TrainError
from seer_rl.trainer import Sample

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "FinishedResponse",
    "ScoredResponse",
    "failures",
    "rollout_facts",
    "samples",
    "score",
    "scored_only",
]


log = structlog.get_logger("seer")

MOST_NAMED = 10
"""Prompts that a warning names."""


@attrs.frozen(eq=False)
class FinishedResponse:
    """A response, and its reward, which may not be computed yet."""

    group: PromptGroup
    completion: Completion
    reward: Future[float]

    def unscored(self) -> Sample:
        """Return the sample that this response is without its reward: the advantage is 0."""
        return _sample(self.group, self.completion, 0.0)


@attrs.frozen(eq=False)
class ScoredResponse:
    """A response and its reward, None if it failed."""

    group: PromptGroup
    completion: Completion
    reward: float | None


def score(finished: Sequence[FinishedResponse]) -> list[ScoredResponse]:
    """Wait for all rewards; log each reason for which some have failed, once."""
    scored, failed = [], dict[str, list[str]]()
    for each in finished:
        reward = None
        try:
            reward = each.reward.result()
        except RewardError as error:
            failed.setdefault(str(error), []).append(each.completion.request_id)
        scored.append(ScoredResponse(each.group, each.completion, reward))
    for reason, requests in failed.items():
        prompts = list(dict.fromkeys(name.rpartition("/")[0] for name in requests))
        log.warning(
            "reward_failed",
            responses=len(requests),
            first=requests[0],
            prompts=prompts[:MOST_NAMED],
            reason=reason,
        )
    return scored


def scored_only(scored: Sequence[ScoredResponse], iteration: int) -> list[ScoredResponse]:
    """Return the responses that have a reward.

    Raises:
        TrainError: there is none.
    """
    kept = [each for each in scored if each.reward is not None]
    if not kept:
        raise TrainError(
            f"no response of iteration {iteration} has a reward: mend the reward function;"
            " the warnings above say why each failed"
        )
    return kept


def samples(
    scored: Sequence[ScoredResponse],
    *,
    scale: bool,
    replay_routing: bool = False,
    experts_per_token: int | None = None,
) -> list[Sample]:
    """Return what is trained on, with advantages within groups; failed rewards belong to no group.

    With ``replay_routing`` they have the experts that the engine took, of which SGLang's servers answer so
    many for each token without saying so.

    Raises:
        TrainError: routing is to be replayed, and a response lacks the experts that the engine took.
    """
    groups: dict[str, list[ScoredResponse]] = {}
    for each in scored:
        groups.setdefault(each.group.id, []).append(each)
    return [
        attrs.evolve(
            _sample(each.group, each.completion, advantage),
            routed_experts=_experts(each, experts_per_token) if replay_routing else None,
        )
        for members in groups.values()
        for each, advantage in zip(
            members,
            group_advantages([each.reward for each in members if each.reward is not None], scale=scale),
            strict=True,
        )
    ]


def _sample(group: PromptGroup, completion: Completion, advantage: float) -> Sample:
    """Return a sample in which the environment's tokens, if there are any, are not trained on."""
    prompt, mask = group.prompt_token_ids, bytes(completion.loss_mask) if completion.turns else None
    found = completion.attachments or group.attachments  # those of answers are with those of the prompt
    images = found if isinstance(found, PlacedImages) else None
    return Sample(prompt, completion.token_ids, completion.logprobs, advantage, mask, images=images)


def _experts(scored: ScoredResponse, experts_per_token: int | None) -> NDArray[np.uint16]:
    try:
        experts = routed_experts(scored.completion, len(scored.group.prompt_token_ids), experts_per_token)
    except EngineError as error:
        raise TrainError(f"[train].replay_routing: {error}") from error
    if experts is None:
        raise TrainError(
            "[train].replay_routing: the engine does not answer the experts that it takes; set its"
            " engine_args.enable_return_routed_experts = true, give each prompt of SGLang's servers"
            " attachments = { return_routed_experts = true }, or leave replay_routing out"
        )
    return experts


def failures(scored: Sequence[ScoredResponse]) -> dict[str, int]:
    """Count responses without a reward: those that an engine failed, and those whose reward failed."""
    without = [each.completion.whole for each in scored if each.reward is None]
    return {"failed_responses": without.count(False), "failed_rewards": without.count(True)}


def rollout_facts(scored: Sequence[ScoredResponse]) -> dict[str, Any]:
    """Return metrics of what was rolled out; they do not depend on how it was scheduled."""
    rewards = [each.reward for each in scored if each.reward is not None]
    lengths = [len(each.completion.token_ids) for each in scored]
    reasons = Counter(each.completion.finish_reason for each in scored)
    mixed: dict[str, set[float]] = {}
    for each in scored:
        if each.reward is not None:
            mixed.setdefault(each.group.id, set()).add(each.reward)
    return {
        "responses": len(scored),
        **failures(scored),
        "reward_mean": math.fsum(rewards) / len(rewards),
        "mixed_groups": sum(len(values) > 1 for values in mixed.values()) / len(mixed),
        "tokens": sum(lengths),
        "environment_tokens": sum(turn.answer_tokens for each in scored for turn in each.completion.turns),
        "turns": sum(len(each.completion.turns) for each in scored),
        "mean_tokens": sum(lengths) / len(lengths),
        "max_tokens": max(lengths),
        "cut": reasons["length"] / len(scored),
        "rewards_sha256": _digest(each.reward for each in scored),
        "tokens_sha256": _digest([each.completion.request_id, *each.completion.token_ids] for each in scored),
        "engine_logprobs_sha256": _digest(list(each.completion.logprobs) for each in scored),
    }


def _digest(values: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for value in values:
        digest.update(msgspec.json.encode(value) + b"\n")
    return digest.hexdigest()
