"""The trainer ``megatron``: Megatron-core's GPT model in ranks of its own, shared out as it has it.

This process tells the ranks what to do and holds no weights.  On a CPU the ranks speak gloo, on GPUs NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from seer_core.errors import ConfigError
from seer_rl.agreement import agreement
from seer_rl.config import TrainTable
from seer_rl.errors import TrainError
from seer_rl.models import copy_all_but_weights
from seer_rl.ranks import Ranks
from seer_rl.trainer import Sample

__all__ = ["MegatronTrainer"]


class MegatronTrainer:
    """A ``Trainer`` and a context manager, entered once: the ranks live inside.

    The same layout gives the same weights, bit for bit.  Layouts differ by rounding, since they add up in
    other orders.
    """

    def __init__(self, table: TrainTable, model: Path, seed: int) -> None:
        """Look at the model of a directory, and start nothing.

        Raises:
            ConfigError: Megatron-core is not installed, the model is none that it can be given here, or it
                cannot be shared out so.
        """
        if find_spec("megatron") is None:
            raise ConfigError("Megatron-core is not installed: pip install 'seer-rl[megatron]'")
        try:
            self._config: Any = AutoConfig.from_pretrained(model, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the trainer cannot load the model in {model}: {error}") from error
        _check_model(self._config, model)
        _check_layout(table, self._config)
        self._table, self._first, self._seed = table, model, seed
        self._ranks: Ranks | None = None

    def __enter__(self) -> MegatronTrainer:
        """Start the ranks, and have them read the first weights.

        Raises:
            ConfigError: they cannot be read.
            TrainError: a rank is lost or hung.
        """
        environment = {"GLOO_SOCKET_IFNAME": "lo", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        megatron = self._table.megatron
        self._ranks = Ranks("seer_rl.megatron_rank", megatron.ranks, environment, megatron.timeout_s)
        try:
            self._ask("start", self._table, str(self._first), self._seed)
        except BaseException:
            self._ranks.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._ranks is not None
        self._ranks.close()

    def _ask(self, what: str, *arguments: Any) -> list[Any]:
        assert self._ranks is not None, "enter the trainer first"
        return self._ranks.ask(what, *arguments)

    def when_lost(self, tell: Callable[[TrainError], None]) -> None:
        """Have ``tell`` called, in a thread of its own, once a rank has died."""
        assert self._ranks is not None, "enter the trainer first"
        self._ranks.when_lost(tell)

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""
        return int(self._config.vocab_size)

    def train(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Make ``epochs`` updates; the loss is a mean over all response tokens of the batch, in all ranks."""
        learnt = self._ask("train", samples)
        metrics: dict[str, float] = learnt[0][0]
        told = [(engine, trainer) for _, engine, trainer in learnt if len(engine)]
        engine, trainer = ([torch.from_numpy(both[which]) for both in told] for which in (0, 1))
        return metrics | agreement(engine, trainer)

    def export(self, directory: Path) -> None:
        """Write the whole model: a file of weights, or one for each stage of the pipeline."""
        self._ask("export", str(directory))
        copy_all_but_weights(self._first, directory)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that ``export`` writes, as the ranks send them."""
        for arrays in self._ask("arrays"):
            for name, array in arrays.items():
                yield name, torch.from_numpy(array)

    def save(self, directory: Path) -> None:
        """Write each rank's part of the optimizer; only the same layout can take it up again."""
        self._ask("save", str(directory))

    def load(self, directory: Path) -> None:
        """Be again as at ``export`` and ``save``."""
        self._ask("load", str(directory))


def _check_model(config: Any, model: Path) -> None:
    kind = config.model_type
    if (
        kind != "qwen3"
        or config.rope_parameters["rope_type"] != "default"
        or config.hidden_act != "silu"
        or config.attention_bias
        or config.use_sliding_window
    ):
        raise ConfigError(
            'the trainer "megatron" knows dense Qwen3 models with plain rotary embeddings, without biases and'
            f' sliding windows, and the one in {model}, a {kind}, is none; use trainer = "torch"'
        )


def _check_layout(table: TrainTable, config: Any) -> None:
    """Refuse what cannot be shared out in equal parts.

    Megatron-core would pad a vocabulary; but the log-probs of a padded one are not the model's.
    """
    layout, device = table.megatron, table.torch.device
    shares = [
        ("tensor_parallel", layout.tensor_parallel, "num_attention_heads", "heads"),
        ("tensor_parallel", layout.tensor_parallel, "num_key_value_heads", "heads of keys and values"),
        ("tensor_parallel", layout.tensor_parallel, "intermediate_size", "columns of an MLP"),
        ("tensor_parallel", layout.tensor_parallel, "vocab_size", "tokens of the vocabulary"),
        ("pipeline_parallel", layout.pipeline_parallel, "num_hidden_layers", "layers"),
    ]
    for setting, parts, key, what in shares:
        if getattr(config, key) % parts:
            raise ConfigError(
                f"[train.megatron].{setting} = {parts} cannot share out the model's {getattr(config, key)}"
                f" {what} in equal parts; choose a divisor"
            )
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            f'[train.torch].device = "{device}": the trainer "megatron" runs on "cpu" or "cuda"'
        )
    if device == "cuda" and layout.ranks > (devices := torch.cuda.device_count()):
        raise ConfigError(
            f"[train.megatron] asks for {layout.ranks} ranks, each with a GPU of its own, and there are"
            f" {devices}; lower one of its numbers"
        )
