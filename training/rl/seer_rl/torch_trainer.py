"""The trainer of one process: AdamW in float32, on a model of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from seer_core.errors import ConfigError, quote
from seer_rl.adapted_model import AdaptedModel
from seer_rl.agreement import agreement
from seer_rl.batches import MicroBatch, micro_batches
from seer_rl.config import TrainTable
from seer_rl.models import HuggingFaceModel
from seer_rl.optimizer_state import load_optimizer, save_optimizer
from seer_rl.trainer import Sample, Trainer
from seer_rl.updates import NO_UPDATE, PolicyUpdates, check_finite

__all__ = ["TorchTrainer"]

OPTIMIZER = "optimizer.pt"


class TorchTrainer(Trainer):
    """Trains in this process, with old log-probs that it computes itself, as exact as the new ones.

    The engine's log-probs, which move by rounding with the batch that they were computed in, are only
    compared with them.
    """

    def __init__(self, table: TrainTable, model: Path, seed: int) -> None:
        """Read the model of a directory.

        Raises:
            ConfigError: it cannot be read.
        """
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(table.torch.threads)
        torch.manual_seed(seed)
        self._table = table
        self._device = _device_of(table.torch.device)
        self._model = AdaptedModel(table, model) if table.lora.rank else HuggingFaceModel(table, model)
        self.takes_images = self._model.images is not None
        self._reference = HuggingFaceModel(table, model) if table.loss.kl else None
        rates = table.optimizer
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=rates.learning_rate,
            betas=(rates.beta1, rates.beta2),
            weight_decay=rates.weight_decay,
        )
        self._updates = 0
        self._precomputed: list[tuple[MicroBatch, Tensor]] = []

    @property
    def vocab_size(self) -> int:
        """How many tokens the model has."""
        return self._model.vocab_size

    def train(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Make ``epochs`` updates; the loss is a mean over all response tokens of the batch.

        Responses without an advantage have no gradient unless there is a penalty, and are not computed then.
        """
        updates = PolicyUpdates.plan(self._table, samples, self._reference_logprobs)
        if updates is None:
            return NO_UPDATE | agreement([], [])

        def epoch() -> list[float]:
            totals = [0.0] * 3
            for number, batch in enumerate(updates.batches):
                loss, figures = updates.loss(number, self._model.logprobs(batch))
                loss.backward()  # type: ignore[no-untyped-call]
                totals = [total + figure for total, figure in zip(totals, figures, strict=True)]
            return totals

        metrics = updates.run(epoch, self._step)
        return metrics | agreement(
            [batch.engine_logprobs for batch in updates.batches],
            [each.cpu() for each in updates.old_logprobs],
        )

    def _step(self, loss: float) -> tuple[float, float]:
        """Step along the gradient that has been gathered; return its norm and the learning rate."""
        table = self._table.optimizer
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), table.max_grad_norm).item()
        try:
            check_finite(loss, norm)
            rate = table.rate(self._updates)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        finally:
            self._optimizer.zero_grad()
        self._updates += 1
        return norm, rate

    def precompute_reference(self, samples: Sequence[Sample]) -> None:
        """Compute the reference's log-probs, if there is a penalty."""
        if self._reference is not None:
            layout = self._table.torch
            batches = micro_batches(samples, layout.micro_tokens, packed=layout.packed)
            self._precomputed = [(batch, self._compute_reference(batch)) for batch in batches]

    def _reference_logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the reference's log-probs, precomputed ones where the micro-batches are the same."""
        precomputed, self._precomputed = self._precomputed, []
        if len(precomputed) == len(batches) and all(
            batch.same_tokens(other) for batch, (other, _) in zip(batches, precomputed, strict=True)
        ):
            return [logprobs for _, logprobs in precomputed]
        return [self._compute_reference(batch) for batch in batches]

    @torch.no_grad()
    def _compute_reference(self, batch: MicroBatch) -> Tensor:
        assert self._reference is not None
        return self._reference.logprobs(attrs.evolve(batch, experts=None))  # it takes experts of its own

    def export(self, directory: Path) -> None:
        """Write the weights, and the other files that engines read."""
        self._model.export(directory)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that ``export`` writes."""
        yield from self._model.tensors().items()

    def adapter_config(self) -> dict[str, Any] | None:
        """Return PEFT's config of the adapter; None if all weights are trained."""
        return self._model.adapter_config()

    def save(self, directory: Path) -> None:
        """Write the optimizer, the number of updates and the state of torch's random numbers."""
        save_optimizer(directory / OPTIMIZER, self._optimizer, self._updates)

    def load(self, directory: Path) -> None:
        """Restore the state in which ``export`` and ``save`` wrote."""
        self._model.load(directory)
        self._updates = load_optimizer(directory / OPTIMIZER, self._optimizer, self._device)


def _device_of(name: str) -> torch.device:
    """Return a device of this machine.

    Raises:
        ConfigError: torch cannot use it.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except Exception as error:  # torch raises a class of its own for each kind of device
        raise ConfigError(
            f'[train.torch].device: torch cannot use {quote(name)}: {error}; use "cpu", or mend its set-up'
        ) from error
    return device
