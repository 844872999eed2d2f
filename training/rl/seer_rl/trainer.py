"""The trainer's port: what the training loop asks of the object that holds the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import attrs
from seer_host.images import PlacedImages

from seer_core.ports.contracts import optional
from seer_rl.errors import TrainError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Sample", "Trainer", "checked_metrics"]

REQUIRED_METRICS = ("loss", "grad_norm", "dlogp_mean", "dlogp_p9999", "dlogp_max")
"""What ``Trainer.train`` has to return, at least."""


@attrs.frozen(eq=False)
class Sample:
    """One response to train on.

    ``logprobs`` are the engine's, one per token of ``response``.  The trainer compares them with its own and
    does not train on them.
    """

    prompt: Sequence[int]
    """The tokens of the prompt."""
    response: Sequence[int]
    logprobs: Sequence[float]
    advantage: float
    """The weight of each of its trained tokens in the loss."""
    loss_mask: bytes | None = None
    """For each token of ``response`` 1 if it is trained on, and 0 if an environment answered it; None where
    all are trained on.
    """
    routed_experts: NDArray[np.uint16] | None = None
    """The experts that the engine took for each position of prompt and response but the last, [positions,
    layers, experts per token]; None unless ``[train].replay_routing``.
    """
    images: PlacedImages | None = None
    """The images among the tokens of prompt and response; None if there are none."""

    @property
    def trained_tokens(self) -> int:
        """How many tokens of the response are trained on."""
        return len(self.response) if self.loss_mask is None else sum(self.loss_mask)


class Trainer(Protocol):
    """Holds weights and optimizer; the same calls in the same order give the same weights, bit for bit.

    One call at a time.  ``export`` and ``save`` of a checkpoint come from another thread, while the next
    rollout is under way.

    A trainer is made by ``factory(table, model, seed)``: the ``[train]`` table, the directory of the first
    weights, and the run's seed.  See ``seer_rl.torch_trainer.TorchTrainer``.  A class that derives from this
    one inherits what may be left out.  A trainer that is a context manager as well, because it has processes
    for example, is entered before anything but ``vocab_size`` is used, and left when training ends.
    """

    takes_images: bool = False
    """Whether the model is shown the images of samples; else prompts with images are refused."""

    @property
    def vocab_size(self) -> int:
        """How many tokens the model has."""
        ...

    def train(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Train on one iteration's samples, in submission order; return metrics.

        Tokens that a sample's ``loss_mask`` leaves out are context alone: they have no loss, no penalty and
        no log-prob, and do not count in the mean.

        Among them are ``loss``, ``grad_norm``, and ``dlogp_mean``, ``dlogp_p9999`` and ``dlogp_max``: how far
        the engine's log-probs are from the trainer's own, before the update, over ``trained_tokens``.

        Raises:
            TrainError: loss or gradient is not finite; the weights are as before.
        """
        ...

    def export(self, directory: Path) -> None:
        """Write the weights as Hugging Face models have them, config and safetensors, into a directory.

        Of an adapter they are PEFT's ``adapter_model.safetensors`` and ``adapter_config.json`` alone.
        """

    def save(self, directory: Path) -> None:
        """Write everything that ``load`` needs, beside what ``export`` writes, into a directory."""

    def load(self, directory: Path) -> None:
        """Restore the state in which ``export`` and ``save`` wrote into this directory."""

    @optional
    def precompute_reference(self, samples: Sequence[Sample]) -> None:
        """Compute what of the next ``train`` needs no rewards, while the last of them are computed.

        May be left out.  ``samples`` are those of ``train``, all advantages 0; those whose reward fails will
        be missing there.  The result of training does not depend on this call, by no bit.
        """
        return

    @optional
    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Yield the torch tensors that ``export`` would write, by the names that they have there.

        May be left out; ``[train].weights = "shared_memory"`` needs it.
        """
        return iter(())

    @optional
    def adapter_config(self) -> dict[str, Any] | None:
        """Return PEFT's config of the adapter that ``tensors`` yields; None if they are whole weights.

        May be left out.
        """
        return None

    @optional
    def when_lost(self, notify: Callable[[TrainError], None]) -> None:
        """Have ``notify`` called from another thread once the trainer cannot train any more.

        May be left out; it is for trainers whose processes can die during a rollout.  It is called soon if
        one is lost already.
        """
        return


def checked_metrics(returned: object) -> dict[str, float]:
    """Return what a trainer's ``train`` has returned, as Python's own numbers.

    Raises:
        TrainError: it is no dict of numbers, or lacks one of ``REQUIRED_METRICS`` that is finite.
    """
    if not isinstance(returned, Mapping):
        raise TrainError(f"the trainer's train() returned {returned!r:.60}: return a dict of metrics")
    for name, value in returned.items():
        if not (isinstance(name, str) and isinstance(value, Real)):
            raise TrainError(f"the trainer's train() returned {value!r:.60} as {name!r:.60}: return a number")
    for name in REQUIRED_METRICS:
        if name not in returned or not math.isfinite(returned[name]):
            raise TrainError(
                f"the trainer's train() returned {returned.get(name, 'nothing')} as {name!r}, where a finite"
                " number is needed"
            )
    return {name: int(each) if isinstance(each, Integral) else float(each) for name, each in returned.items()}
