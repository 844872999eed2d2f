"""The loss, token by token: pure functions of tensors.

All take one value per trained token, [n]; the rows and columns of the micro-batch do not matter.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from seer_rl.config import LossTable

__all__ = ["PolicyLoss", "clipped_policy_loss", "kl_penalty", "policy_loss", "token_logprobs"]


def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probs, in nats, of ``targets`` [n] under ``logits`` [n, vocabulary]; float32."""
    return torch.log_softmax(logits.float(), -1).gather(-1, targets[:, None])[:, 0]


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped loss of each token, and which tokens were clipped.

    The ratio of new to old probability counts within [1 - ``clip_low``, 1 + ``clip_high``] where going
    further would lower the loss (arXiv 1707.06347; two bounds as in DAPO, arXiv 2503.14476).  Where old and
    new are the same, the gradient is that of REINFORCE.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    gain = ratio * advantages
    clipped_gain = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(gain, clipped_gain), clipped_gain < gain


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return an unbiased, never negative estimate of KL(policy || reference) at each token.

    It is Schulman's k3, r - 1 - log r with r = reference / policy (http://joschu.net/blog/kl-approx.html).
    """
    log_ratio = reference_logprobs - logprobs
    return torch.exp(log_ratio) - 1 - log_ratio


@attrs.frozen(eq=False)
class PolicyLoss:
    """The loss of each trained token, [n]; how many were clipped; and their distance from the reference."""

    loss: Tensor
    clipped: float
    divergence: float


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, reference: Tensor | None, table: LossTable
) -> PolicyLoss:
    """Return the clipped loss with the penalty for the distance from a reference's log-probs, if any."""
    loss, clipped = clipped_policy_loss(
        logprobs, old_logprobs, advantages, clip_low=table.clip_low, clip_high=table.clip_high
    )
    if reference is None:
        return PolicyLoss(loss, clipped.sum().item(), 0.0)
    penalty = kl_penalty(logprobs, reference)
    return PolicyLoss(loss + table.kl * penalty, clipped.sum().item(), penalty.sum().item())
