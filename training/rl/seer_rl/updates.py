"""The updates that one iteration makes, the same for every trainer: the loss, its sums, and the metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs
from torch import Tensor

from seer_rl.batches import MicroBatch, micro_batches
from seer_rl.config import LossTable, TrainTable
from seer_rl.errors import TrainError
from seer_rl.losses import policy_loss
from seer_rl.trainer import Sample

__all__ = ["NO_UPDATE", "PolicyUpdates", "check_finite"]

NO_UPDATE = {
    "trained_tokens": 0,
    "learning_rate": 0.0,
    "grad_norm": 0.0,
    "loss": 0.0,
    "clipped": 0.0,
    "kl": 0.0,
}
"""Metrics of an iteration in which there was nothing to train on."""


@attrs.define(eq=False)
class PolicyUpdates:
    """The updates by one iteration's samples, or by the micro-batches of them that one replica has.

    The loss is a mean over the trained tokens of all responses, of those without a gradient too.
    ``reference`` has the reference's log-probs of each micro-batch, and is empty without a penalty.
    """

    table: LossTable
    samples: Sequence[Sample]
    trained: Sequence[Sample]
    batches: Sequence[MicroBatch]
    reference: Sequence[Tensor]
    old_logprobs: list[Tensor] = attrs.field(factory=list, init=False)

    @classmethod
    def plan(
        cls,
        table: TrainTable,
        samples: Sequence[Sample],
        reference: Callable[[Sequence[MicroBatch]], Sequence[Tensor]],
        replica: int = 0,
        replicas: int = 1,
    ) -> PolicyUpdates | None:
        """Lay the samples out in micro-batches; None if none of them has a gradient."""
        # Without a penalty, only an advantage makes a gradient.
        trained = samples if table.loss.kl else [sample for sample in samples if sample.advantage]
        layout = table.torch
        batches = micro_batches(trained, layout.micro_tokens, packed=layout.packed)
        if not batches:
            return None
        own = batches[replica::replicas]
        return cls(table.loss, samples, trained, own, reference(own) if table.loss.kl else ())

    def loss(self, number: int, logprobs: Tensor) -> tuple[Tensor, list[float]]:
        """Return a micro-batch's part of the loss; and it, the clipped tokens and the divergence as numbers.

        The log-probs of the first epoch are the old ones of all epochs.
        """
        if number == len(self.old_logprobs):
            self.old_logprobs.append(logprobs.detach())
        part = policy_loss(
            logprobs,
            self.old_logprobs[number],
            self.batches[number].advantages.to(logprobs.device),
            self.reference[number] if self.reference else None,
            self.table,
        )
        share = part.loss.sum() / _tokens(self.samples)
        return share, [share.item(), part.clipped, part.divergence]

    def run(
        self, epoch: Callable[[], Sequence[float]], step: Callable[[float], tuple[float, float]]
    ) -> dict[str, float]:
        """Make an update in each epoch, and return their metrics.

        ``epoch`` computes the gradient of all micro-batches and returns the sums of what ``loss`` returned.
        ``step`` is given the loss, and returns the norm of the gradient and the learning rate.
        """
        losses, norms, clipped, divergence, rate = [], [], 0.0, 0.0, 0.0
        for _ in range(self.table.epochs):
            epoch_loss, epoch_clipped, epoch_divergence = epoch()
            norm, rate = step(epoch_loss)
            losses.append(epoch_loss)
            norms.append(norm)
            clipped += epoch_clipped
            divergence += epoch_divergence
        trained_tokens = _tokens(self.trained)
        compared = self.table.epochs * trained_tokens
        return {
            "trained_tokens": trained_tokens,
            "loss": sum(losses) / self.table.epochs,
            "grad_norm": sum(norms) / self.table.epochs,
            "learning_rate": rate,
            "clipped": clipped / compared,
            "kl": divergence / compared,
        }


def check_finite(loss: float, norm: float) -> None:
    """Refuse an update that would destroy the weights.

    Raises:
        TrainError: the loss, or the norm of its gradient, is not finite.
    """
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise TrainError(
            f"the loss is {loss} and the norm of its gradient {norm}: the weights would be lost;"
            " lower the learning rate, or look at the rewards"
        )


def _tokens(samples: Sequence[Sample]) -> int:
    return sum(sample.trained_tokens for sample in samples)
