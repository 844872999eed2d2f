"""The trainer ``megatron``: Megatron-core's GPT model, shared out over ranks that are processes.

This process sends the ranks requests and holds no weights.  On a CPU the ranks use gloo, on GPUs NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from seer_host.installation import how_to_install
from torch import Tensor
from transformers import AutoConfig

from seer_core.errors import ConfigError
from seer_rl.agreement import agreement
from seer_rl.config import TrainTable
from seer_rl.errors import TrainError
from seer_rl.models import copy_all_but_weights
from seer_rl.rank_messages import AddSample, CallLearner, SendTensors, StartRank, ToRank, Train
from seer_rl.ranks import RankAnswer, Ranks
from seer_rl.trainer import Sample, Trainer

__all__ = ["MegatronTrainer"]


class MegatronTrainer(Trainer):
    """Trains in ranks that live as long as its ``with`` block, which is entered once.

    The same layout gives the same weights, bit for bit.  Layouts differ by rounding, since they add up in
    other orders.
    """

    def __init__(self, table: TrainTable, model: Path, seed: int) -> None:
        """Check the model of a directory and the layout; nothing is started yet.

        Raises:
            ConfigError: Megatron-core is not installed, the model is not supported, or the layout does not
                divide it.
        """
        if find_spec("megatron") is None:
            raise ConfigError(f"Megatron-core is not installed; {how_to_install('megatron', '`make setup`')}")
        try:
            self._config: Any = AutoConfig.from_pretrained(model, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the trainer cannot load the model in {model}: {error}") from error
        _check_model(self._config, model)
        if table.replay_routing:
            raise ConfigError(
                '[train].replay_routing: the trainer "megatron" has dense models alone; use "torch"'
            )
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
            self._ask(StartRank(self._table, str(self._first), self._seed))
        except BaseException:
            self._ranks.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._ranks is not None
        self._ranks.close()

    def _ask(self, *messages: ToRank) -> list[RankAnswer]:
        assert self._ranks is not None, "enter the trainer first"
        return self._ranks.ask(*messages)

    def when_lost(self, notify: Callable[[TrainError], None]) -> None:
        """Have ``notify`` called, in a thread of its own, once a rank has died."""
        assert self._ranks is not None, "enter the trainer first"
        self._ranks.when_lost(notify)

    @property
    def vocab_size(self) -> int:
        """How many tokens the model has."""
        return int(self._config.vocab_size)

    def train(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Make ``epochs`` updates; the loss is a mean over all response tokens of the batch, in all ranks."""
        answers = self._ask(*map(AddSample.of, samples), Train())
        pairs = [answer.arrays for answer in answers if len(answer.arrays["engine"])]
        engine, trainer = ([torch.from_numpy(pair[of]) for pair in pairs] for of in ("engine", "trainer"))
        return answers[0].metrics | agreement(engine, trainer)

    def export(self, directory: Path) -> None:
        """Write the whole model: a file of weights, or one for each stage of the pipeline."""
        self._ask(CallLearner("export", str(directory)))
        copy_all_but_weights(self._first, directory)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that ``export`` writes, as the ranks send them."""
        for answer in self._ask(SendTensors()):
            for name, array in answer.arrays.items():
                yield name, torch.from_numpy(array)

    def save(self, directory: Path) -> None:
        """Write each rank's part of the optimizer; only the same layout can load it."""
        self._ask(CallLearner("save", str(directory)))

    def load(self, directory: Path) -> None:
        """Restore the state in which ``export`` and ``save`` wrote."""
        self._ask(CallLearner("load", str(directory)))


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
            'the trainer "megatron" supports dense Qwen3 models with plain rotary embeddings, no biases, no'
            f' sliding windows, and the one in {model}, a {kind}, is none; use trainer = "torch"'
        )


def _check_layout(table: TrainTable, config: Any) -> None:
    """Refuse a layout that does not share the model out in equal parts.

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
