"""A rank's part of model and optimizer of the trainer ``megatron``, and what the rank computes with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from seer_core.errors import ConfigError
from seer_rl.batches import MicroBatch
from seer_rl.config import TrainTable
from seer_rl.megatron_model import build, forward, logprobs
from seer_rl.megatron_weights import Share, Weights, file_name, from_megatron, index, read_share
from seer_rl.optimizer_state import load_optimizer, save_optimizer
from seer_rl.trainer import Sample
from seer_rl.updates import NO_UPDATE, PolicyUpdates, check_finite

__all__ = ["Learner"]

INDEX = "model.safetensors.index.json"
OPTIMIZER = "optimizer-{}.pt"


class Learner:
    """The rank's part of model and optimizer.  All ranks call the same methods, in the same order."""

    def __init__(
        self,
        table: TrainTable,
        model: str,
        seed: int,
        device: torch.device,
        progress: Callable[[], None],
    ) -> None:
        """Read this rank's part of the first weights, in a directory; the process groups exist already.

        ``progress`` is called with each micro-batch that this rank begins.
        """
        self._table, self._device, self._progress = table, device, progress
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(table.torch.threads)
        torch.manual_seed(seed)
        self._config: Any = AutoConfig.from_pretrained(model, local_files_only=True)
        self._share = Share(
            self._config,
            parallel_state.get_tensor_model_parallel_rank(),
            table.megatron.tensor_parallel,
            parallel_state.get_pipeline_model_parallel_rank(),
            table.megatron.pipeline_parallel,
        )
        self._replica = parallel_state.get_data_parallel_rank()
        self._reference = self._model(model) if table.loss.kl else None
        bare = self._model(model)
        self._ddp: Any = DistributedDataParallel(
            bare.config, DistributedDataParallelConfig(use_distributed_optimizer=True), bare
        )
        rates = table.optimizer
        self._optimizer: Any = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=rates.learning_rate,
                adam_beta1=rates.beta1,
                adam_beta2=rates.beta2,
                weight_decay=rates.weight_decay,
                clip_grad=rates.max_grad_norm,
                params_dtype=torch.float32,
                use_distributed_optimizer=True,
            ),
            [self._ddp],
        )
        self._updates = 0

    def _model(self, directory: str) -> Any:
        model = build(self._config, self._device)
        self._read_into(model, Path(directory))
        return model

    def _read_into(self, model: Any, directory: Path) -> None:
        """Read a model's weights into the memory that it has."""
        try:
            weights = read_share(directory, self._share)
            outcome = model.load_state_dict(weights, strict=False)
        except (OSError, KeyError, RuntimeError, SafetensorError) as error:
            raise ConfigError(
                f"the trainer cannot read the weights in {directory}: {type(error).__name__}: {error}; it"
                " reads safetensors of a dense Qwen3 model"
            ) from error
        missing = [name for name in outcome.missing_keys if not name.endswith("_extra_state")]
        if missing or outcome.unexpected_keys:
            raise ConfigError(f"{directory}: weights lack {missing} and have {outcome.unexpected_keys}")

    def train(self, samples: Sequence[Sample]) -> tuple[dict[str, float], Any, Any]:
        """Train as ``Trainer.train`` does; the replicas take micro-batches in turn.

        Return metrics, which are the same in all ranks, and the engine's and the trainer's log-probs of the
        rank's micro-batches, numpy arrays.  They are empty in ranks that compute none, and where another rank
        of the stage reports them.
        """
        updates = PolicyUpdates.plan(
            self._table,
            samples,
            self._reference_logprobs,
            self._replica,
            self._table.megatron.data_parallel,
        )
        if updates is None:
            return NO_UPDATE, *_flattened([], [])

        def epoch() -> list[float]:
            self._ddp.zero_grad_buffer()
            self._optimizer.zero_grad()
            sums = self._run(self._ddp, updates.batches, updates.loss)
            finalize_model_grads([self._ddp])
            return self._total(sums)

        metrics = updates.run(epoch, self._step)
        reported = updates.old_logprobs if self._share.tensor_rank == 0 else []
        return metrics, *_flattened(updates.batches, reported)

    def _run(
        self,
        model: Any,
        batches: Sequence[MicroBatch],
        evaluate: Callable[[int, Tensor], tuple[Tensor, Sequence[float]]],
        *,
        backward: bool = True,
    ) -> list[float]:
        """Send micro-batches through the pipeline, and return the sums of the figures of each.

        In the last stage, ``evaluate`` is given a micro-batch's number and log-probs, and returns its loss
        and figures to add up.
        """
        if not batches:  # there were fewer of them than replicas
            return [0.0] * 3
        numbers = iter(range(len(batches)))

        def step(_: object, stage: Any) -> tuple[Tensor, Any]:
            number = next(numbers)
            batch = batches[number]
            self._progress()

            def loss(losses: Tensor) -> tuple[Tensor, Tensor, Sequence[float]]:
                value, figures = evaluate(number, logprobs(losses, batch))
                return value, torch.tensor(0, dtype=torch.int), figures

            return forward(stage, batch, self._device, packed=self._table.torch.packed), loss

        figures = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=None,
            model=model,
            num_microbatches=len(batches),
            seq_length=1,  # each micro-batch has its own
            micro_batch_size=1,
            forward_only=not backward,
        )
        return [sum(column) for column in zip(*figures, strict=True)] or [0.0] * 3

    def _total(self, sums: Sequence[float]) -> list[float]:
        """Add up the sums of the last stages of all replicas, each once."""
        counts = self._share.last and self._share.tensor_rank == 0
        total = torch.tensor([*sums] if counts else [0.0] * 3, dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        found: list[float] = total.tolist()
        return found

    def _step(self, loss: float) -> tuple[float, float]:
        """Step along the gradient that has been gathered; return its norm and the learning rate."""
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        check_finite(loss, norm)
        rate = self._table.optimizer.rate(self._updates)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._updates += 1
        return norm, rate

    @torch.no_grad()
    def _reference_logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        found: list[Tensor] = []

        def keep(_: int, logprobs: Tensor) -> tuple[Tensor, Sequence[float]]:
            found.append(logprobs)
            return logprobs.sum(), ()

        if self._reference is not None:
            self._run(self._reference, batches, keep, backward=False)
        return found

    @torch.no_grad()
    def tensors(self) -> Weights:
        """Return the whole tensors of this stage, in the one rank of it that writes; none in others."""
        if self._replica:
            return {}
        group = parallel_state.get_tensor_model_parallel_group()

        def gather(part: Tensor) -> list[Tensor]:
            parts = [torch.empty_like(part) for _ in range(self._share.tensor_parallel)]
            dist.all_gather(parts, part, group)
            return parts

        weights = from_megatron(self._ddp.module.state_dict(), self._share, gather)
        return {} if self._share.tensor_rank else weights

    def export(self, directory: str) -> None:
        """Write the whole tensors of each stage into a file; the index, too, if there are several."""
        weights = self.tensors()
        if not weights:
            return
        stages = self._share.stages
        with _write_errors_joined():
            save_file(weights, Path(directory, file_name(self._share.stage, stages)), {"format": "pt"})
            if stages > 1 and self._share.first:
                Path(directory, INDEX).write_bytes(index(self._config, stages))

    def save(self, directory: str) -> None:
        """Write this rank's part of the optimizer, the number of updates and the state of random numbers."""
        with _write_errors_joined():
            save_optimizer(self._optimizer_file(directory), self._optimizer.optimizer, self._updates)

    def load(self, directory: str) -> None:
        """Restore the state in which ``export`` and ``save`` wrote."""
        self._read_into(self._ddp.module, Path(directory))
        file = self._optimizer_file(directory)
        self._updates = load_optimizer(file, self._optimizer.optimizer, "cpu")

    def _optimizer_file(self, directory: str) -> Path:
        return Path(directory, OPTIMIZER.format(dist.get_rank()))


@contextmanager
def _write_errors_joined() -> Iterator[None]:
    """Make an ``OSError`` of the errors that torch and safetensors have for a full disk."""
    try:
        yield
    except (RuntimeError, SafetensorError) as error:
        raise OSError(str(error)) from error


def _flattened(batches: Sequence[MicroBatch], logprobs: Sequence[Tensor]) -> tuple[Any, Any]:
    """Return the engine's log-probs and the trainer's, of the micro-batches that the rank has both of."""
    engine = [batch.engine_logprobs for batch, _ in zip(batches, logprobs, strict=False)]
    empty = torch.empty(0)
    return torch.cat([empty, *engine]).numpy(), torch.cat([empty, *(each.cpu() for each in logprobs)]).numpy()
