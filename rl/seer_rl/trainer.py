"""The trainer's port: what the loop asks of whoever holds the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import attrs

from seer_rl.errors import TrainError

__all__ = ["ForeseeingTrainer", "Sample", "SharingTrainer", "Trainer", "WatchedTrainer"]


@attrs.frozen(eq=False)
class Sample:
    """One response to learn from.

    ``logprobs`` are the engine's, one per token of ``response``, which the trainer compares with its own and
    does not learn from.
    """

    prompt: Sequence[int]
    response: Sequence[int]
    logprobs: Sequence[float]
    advantage: float


@runtime_checkable
class Trainer(Protocol):
    """Holds weights and optimizer; the same calls in the same order give the same weights, bit for bit.

    One call at a time.  ``export`` and ``save`` of a checkpoint come from another thread, while the next
    rollout is under way.

    A trainer is made by ``factory(table, model, seed)``: the ``[train]`` table, the directory of the first
    weights, and the run's seed.  See ``seer_rl.torch_trainer.TorchTrainer``.  One that has processes, say, is
    a context manager as well: it is entered before it is asked for anything but ``vocab_size``, and left when
    training ends.
    """

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""

    def train(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Learn from one iteration's samples, in submission order; return metrics.

        Among them are ``loss``, ``grad_norm``, and ``dlogp_mean``, ``dlogp_p9999`` and ``dlogp_max``: how far
        the engine's log-probs are from the trainer's own, before the update, over ``trained_tokens``.

        Raises:
            TrainError: loss or gradient is not finite; the weights are as before.
        """

    def export(self, directory: Path) -> None:
        """Write the weights as Hugging Face models have them, config and safetensors, into a directory."""

    def save(self, directory: Path) -> None:
        """Write everything that ``load`` needs, beside what ``export`` writes, into a directory."""

    def load(self, directory: Path) -> None:
        """Be again as when ``export`` and ``save`` wrote into this directory."""


@runtime_checkable
class ForeseeingTrainer(Trainer, Protocol):
    """A trainer that can use the time in which the last rewards are computed."""

    def foresee(self, samples: Sequence[Sample]) -> None:
        """Compute what of the next ``train`` needs no rewards.

        These are its samples, all advantages 0; those whose reward fails will be missing there.  It changes
        nothing of what is learnt, by no bit.
        """


@runtime_checkable
class SharingTrainer(Trainer, Protocol):
    """A trainer that can show its weights without writing files: ``[train].weights = "shared_memory"``."""

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Yield the torch tensors that ``export`` would write, by the names that they have there."""


@runtime_checkable
class WatchedTrainer(Trainer, Protocol):
    """A trainer of processes that can die while nobody asks it for anything: during a rollout, say."""

    def when_lost(self, tell: Callable[[TrainError], None]) -> None:
        """Have ``tell`` called from another thread once it cannot train any more, soon if that is so now."""
