"""What a rank of the trainer ``megatron`` holds, a part of model and optimizer, and what it does with it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
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
from seer_rl.batches import MicroBatch, micro_batches
from seer_rl.config import TrainTable
from seer_rl.errors import TrainError
from seer_rl.losses import policy_loss
from seer_rl.megatron_model import build, forward, logprobs
from seer_rl.megatron_weights import Share, Weights, file_name, from_megatron, index, read_share
from seer_rl.trainer import Sample

__all__ = ["Learner"]

INDEX = "model.safetensors.index.json"
OPTIMIZER = "optimizer-{}.pt"


class Learner:
    """The rank's part of model and optimizer.  All ranks are asked the same, in the same order."""

    def __init__(
        self,
        table: TrainTable,
        model: str,
        seed: int,
        device: torch.device,
        told: Callable[[], None],
    ) -> None:
        """Read this rank's part of the first weights, in a directory; the ranks have met.

        ``told`` is called when this rank has got a step further.
        """
        self._table, self._device, self._told = table, device, told
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
        self._take(model, Path(directory))
        return model

    def _take(self, model: Any, directory: Path) -> None:
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
        """Learn as ``Trainer.train`` says; micro-batches are dealt out to the replicas in turn.

        Return metrics, which are the same in all ranks, and the engine's and the trainer's log-probs of the
        rank's micro-batches, numpy arrays.  They are empty in ranks that have none, and where another rank of
        the stage tells them.
        """
        loss, layout = self._table.loss, self._table.torch
        tokens = sum(len(sample.response) for sample in samples)
        counted = [sample for sample in samples if sample.advantage or self._reference is not None]
        every = micro_batches(counted, layout.micro_tokens, packed=layout.packed)
        batches = every[self._replica :: self._table.megatron.data_parallel]
        trained_tokens = sum(len(sample.response) for sample in counted)
        metrics = {"trained_tokens": trained_tokens, "learning_rate": 0.0, "grad_norm": 0.0, "loss": 0.0}
        if not every:
            return metrics | {"clipped": 0.0, "kl": 0.0}, *_series([], [])
        reference = self._reference_logprobs(batches)
        old: list[Tensor] = []
        losses, norms, clipped_tokens, divergence = [], [], 0.0, 0.0
        for epoch in range(loss.epochs):

            def step(number: int, found: Tensor, epoch: int = epoch) -> tuple[Tensor, Sequence[float]]:
                if epoch == 0:
                    old.append(found.detach())
                part = policy_loss(
                    found,
                    old[number],
                    batches[number].advantages.to(found.device),
                    reference[number] if reference else None,
                    loss,
                )
                share = part.loss.sum() / tokens
                return share, (share.item(), part.clipped, part.divergence)

            self._ddp.zero_grad_buffer()
            self._optimizer.zero_grad()
            sums = self._run(self._ddp, batches, step)
            finalize_model_grads([self._ddp])
            epoch_loss, epoch_clipped, epoch_divergence = self._total(sums)
            norms.append(self._update(epoch_loss))
            losses.append(epoch_loss)
            clipped_tokens += epoch_clipped
            divergence += epoch_divergence
        compared = loss.epochs * trained_tokens
        metrics |= {
            "loss": sum(losses) / loss.epochs,
            "grad_norm": sum(norms) / loss.epochs,
            "learning_rate": self._optimizer.param_groups[0]["lr"],
            "clipped": clipped_tokens / compared,
            "kl": divergence / compared,
        }
        tells = self._share.tensor_rank == 0
        return metrics, *_series(batches if tells else [], old if tells else [])

    def _run(
        self,
        model: Any,
        batches: Sequence[MicroBatch],
        judge: Callable[[int, Tensor], tuple[Tensor, Sequence[float]]],
        *,
        backward: bool = True,
    ) -> list[float]:
        """Send micro-batches through the pipeline, and return sums of what the last stage makes of each.

        ``judge`` gets a micro-batch's number and log-probs, and returns its loss and figures to add up.
        """
        if not batches:  # there were fewer of them than replicas
            return [0.0] * 3
        numbers = iter(range(len(batches)))

        def step(_: object, stage: Any) -> tuple[Tensor, Any]:
            number = next(numbers)
            batch = batches[number]
            self._told()

            def loss(losses: Tensor) -> tuple[Tensor, Tensor, Sequence[float]]:
                value, figures = judge(number, logprobs(losses, batch))
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
        """Add up what the last stages of all replicas have, each told once."""
        tells = self._share.last and self._share.tensor_rank == 0
        total = torch.tensor([*sums] if tells else [0.0] * 3, dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        found: list[float] = total.tolist()
        return found

    def _update(self, loss: float) -> float:
        """Step along the gradient that has been gathered; return its norm."""
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        if not (abs(loss) < float("inf") and norm < float("inf")):  # NaN is not below either
            raise TrainError(
                f"the loss is {loss} and the norm of its gradient {norm}: the weights would be lost;"
                " lower the learning rate, or look at the rewards"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = self._table.optimizer.rate(self._updates)
        self._optimizer.step()
        self._updates += 1
        return norm

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
        """Return the whole tensors of this stage, in the one rank of it that writes; others have none."""
        if self._replica:
            return {}
        group = parallel_state.get_tensor_model_parallel_group()

        def gather(part: Tensor) -> list[Tensor]:
            parts = [torch.empty_like(part) for _ in range(self._share.tensor_parallel)]
            dist.all_gather(parts, part, group)
            return parts

        weights = from_megatron(self._ddp.module.state_dict(), self._share, gather)
        return {} if self._share.tensor_rank else weights

    def arrays(self) -> dict[str, np.ndarray]:
        """Return ``tensors`` as arrays, which another process can be sent."""
        return {name: tensor.numpy() for name, tensor in self.tensors().items()}

    def export(self, directory: str) -> None:
        """Write the whole tensors of each stage into a file; the index, too, if there are several."""
        weights = self.tensors()
        if not weights:
            return
        stages = self._share.stages
        with _writing():
            save_file(weights, Path(directory, file_name(self._share.stage, stages)), {"format": "pt"})
            if stages > 1 and self._share.first:
                Path(directory, INDEX).write_bytes(index(self._config, stages))

    def save(self, directory: str) -> None:
        """Write this rank's part of the optimizer, the number of updates and the state of random numbers."""
        state = {
            "optimizer": self._optimizer.optimizer.state_dict(),
            "updates": self._updates,
            "random": torch.get_rng_state(),
        }
        with _writing():
            torch.save(state, Path(directory, OPTIMIZER.format(dist.get_rank())))

    def load(self, directory: str) -> None:
        """Be again as at ``export`` and ``save``."""
        self._take(self._ddp.module, Path(directory))
        file = Path(directory, OPTIMIZER.format(dist.get_rank()))
        try:
            state = torch.load(file, weights_only=True, map_location="cpu")
        except (OSError, RuntimeError, pickle.UnpicklingError) as error:
            raise ConfigError(
                f"{file} is no state of an optimizer: {error}; delete {directory} to use the one before"
            ) from error
        self._optimizer.optimizer.load_state_dict(state["optimizer"])
        self._updates = state["updates"]
        torch.set_rng_state(state["random"])


class _writing:
    """Makes one error of those that torch and safetensors have for a full disk."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, RuntimeError | SafetensorError):
            raise OSError(str(error)) from error


def _series(batches: Sequence[MicroBatch], logprobs: Sequence[Tensor]) -> tuple[Any, Any]:
    """Return the engine's log-probs and the trainer's, of the micro-batches that the rank has both of."""
    engine = [batch.engine_logprobs for batch, _ in zip(batches, logprobs, strict=False)]
    empty = torch.empty(0)
    return torch.cat([empty, *engine]).numpy(), torch.cat([empty, *(each.cpu() for each in logprobs)]).numpy()
