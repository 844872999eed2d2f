"""The trainer of one process: AdamW in float32, on a model of transformers."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from seer_core.errors import ConfigError, quote
from seer_rl.agreement import agreement
from seer_rl.batches import MicroBatch, micro_batches
from seer_rl.config import TrainTable
from seer_rl.errors import TrainError
from seer_rl.losses import policy_loss
from seer_rl.models import HuggingFaceModel
from seer_rl.trainer import Sample

__all__ = ["TorchTrainer"]

OPTIMIZER = "optimizer.pt"


class TorchTrainer:
    """A ``Trainer`` whose old log-probs are its own, recomputed, as exact as its new ones.

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
        self._device = _usable(table.torch.device)
        self._model = HuggingFaceModel(table, model)
        self._reference = HuggingFaceModel(table, model) if table.loss.kl else None
        rates = table.optimizer
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=rates.learning_rate,
            betas=(rates.beta1, rates.beta2),
            weight_decay=rates.weight_decay,
        )
        self._updates = 0
        self._foreseen: list[tuple[MicroBatch, Tensor | None]] = []

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""
        return self._model.vocab_size

    def train(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Make ``epochs`` updates; the loss is a mean over all response tokens of the batch.

        Responses without an advantage have no gradient unless there is a penalty, and are not computed then.
        """
        loss, layout = self._table.loss, self._table.torch
        tokens = sum(len(sample.response) for sample in samples)
        counted = [sample for sample in samples if sample.advantage or self._reference is not None]
        batches = micro_batches(counted, layout.micro_tokens, packed=layout.packed)
        trained_tokens = sum(len(sample.response) for sample in counted)
        metrics = {"trained_tokens": trained_tokens, "learning_rate": 0.0, "grad_norm": 0.0, "loss": 0.0}
        metrics |= agreement([], [])
        if not batches:
            return metrics | {"clipped": 0.0, "kl": 0.0}
        old: list[Tensor] = []
        reference = self._reference_of(batches)
        losses, norms, clipped_tokens, divergence = [], [], 0.0, 0.0
        for epoch in range(loss.epochs):
            epoch_loss = 0.0
            for number, batch in enumerate(batches):
                logprobs = self._model.logprobs(batch)
                if epoch == 0:
                    old.append(logprobs.detach())
                part = policy_loss(
                    logprobs, old[number], batch.advantages.to(self._device), reference[number], loss
                )
                batch_loss = part.loss.sum() / tokens
                batch_loss.backward()  # type: ignore[no-untyped-call]
                epoch_loss += batch_loss.item()
                clipped_tokens += part.clipped
                divergence += part.divergence
            norms.append(self._update(epoch_loss))
            losses.append(epoch_loss)
        compared = loss.epochs * trained_tokens
        return metrics | {
            "loss": sum(losses) / loss.epochs,
            "grad_norm": sum(norms) / loss.epochs,
            "learning_rate": self._optimizer.param_groups[0]["lr"],
            "clipped": clipped_tokens / compared,
            "kl": divergence / compared,
            **agreement([batch.engine_logprobs for batch in batches], [each.cpu() for each in old]),
        }

    def _update(self, loss: float) -> float:
        """Step along the gradient that has been gathered; return its norm."""
        rates = self._table.optimizer
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), rates.max_grad_norm)
        finite = bool(torch.isfinite(norm)) and abs(loss) < float("inf")  # NaN is not below either
        if not finite:
            self._optimizer.zero_grad()
            raise TrainError(
                f"the loss is {loss} and the norm of its gradient {norm.item()}: the weights would be lost;"
                " lower the learning rate, or look at the rewards"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = rates.rate(self._updates)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._updates += 1
        return float(norm.item())

    def foresee(self, samples: Sequence[Sample]) -> None:
        """Compute the reference's log-probs, if there is a penalty."""
        if self._reference is not None:
            layout = self._table.torch
            batches = micro_batches(samples, layout.micro_tokens, packed=layout.packed)
            self._foreseen = [(batch, self._reference_logprobs(batch)) for batch in batches]

    def _reference_of(self, batches: Sequence[MicroBatch]) -> list[Tensor | None]:
        """Return the reference's log-probs, those foreseen where the micro-batches are the same."""
        foreseen, self._foreseen = self._foreseen, []
        if len(foreseen) == len(batches) and all(
            batch.same_tokens(known) for batch, (known, _) in zip(batches, foreseen, strict=True)
        ):
            return [logprobs for _, logprobs in foreseen]
        return [self._reference_logprobs(batch) for batch in batches]

    @torch.no_grad()
    def _reference_logprobs(self, batch: MicroBatch) -> Tensor | None:
        return None if self._reference is None else self._reference.logprobs(batch)

    def export(self, directory: Path) -> None:
        """Write the weights, and whatever else engines read."""
        self._model.export(directory)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that ``export`` writes."""
        yield from self._model.tensors().items()

    def save(self, directory: Path) -> None:
        """Write the optimizer, the number of updates and the state of torch's random numbers."""
        state = {
            "optimizer": self._optimizer.state_dict(),
            "updates": self._updates,
            "random": torch.get_rng_state(),
        }
        torch.save(state, directory / OPTIMIZER)

    def load(self, directory: Path) -> None:
        """Be again as at ``export`` and ``save``."""
        self._model.load(directory)
        file = directory / OPTIMIZER
        try:
            state = torch.load(file, weights_only=True, map_location=self._device)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            fact = (str(error) or type(error).__name__).splitlines()[0]
            raise ConfigError(
                f"{file} is no state of an optimizer: {fact}; delete {directory} to use the one before"
            ) from error
        self._optimizer.load_state_dict(state["optimizer"])
        self._updates = state["updates"]
        torch.set_rng_state(state["random"].cpu())


def _usable(name: str) -> torch.device:
    """Return a device of this machine."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except Exception as error:  # torch raises a class of its own for each kind of device
        raise ConfigError(
            f'[train.torch].device: torch cannot use {quote(name)}: {error}; use "cpu", or mend its set-up'
        ) from error
    return device
