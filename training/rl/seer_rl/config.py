"""The ``[train]`` tables of a config, beside those that say how to roll out."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from seer_core import Config
from seer_core.errors import ConfigError
from seer_core.plugins.config import make_config, read_toml, structure
from seer_core.plugins.config_types import NotNegative, Positive, Seconds, Share

__all__ = [
    "EvaluationTable",
    "LossTable",
    "MegatronTable",
    "OptimizerTable",
    "RewardsTable",
    "TorchTable",
    "TrackingTable",
    "TrainTable",
    "engine_models",
    "first_model",
    "load_training",
]

Count = Annotated[int, Meta(ge=1)]
OwnCount = Annotated[int, Meta(ge=0)]
Parallel = Annotated[int, Meta(ge=1, le=1024)]


class RewardsTable(Struct, frozen=True):
    """``[train.rewards]``: processes that compute rewards, and how long one response may take."""

    workers: Annotated[int, Meta(ge=1, le=1024)] = 1
    timeout_s: Seconds = 10.0


class LossTable(Struct, frozen=True):
    """``[train.loss]``: a token-level policy gradient with clipping; see ``seer_rl.losses``.

    ``epochs`` updates are made of one iteration's batch: with one, old and new policy are the same and
    nothing is clipped.  ``kl`` weighs the distance from the first weights; above 0 the trainer keeps those.
    ``scale`` divides advantages by the standard deviation of their group.
    """

    clip_low: Share = 0.2
    clip_high: NotNegative = 0.28
    kl: NotNegative = 0.0
    scale: bool = True
    epochs: Count = 1


class EvaluationTable(Struct, frozen=True):
    """``[train.evaluation]``: held-out prompts, scored by the same reward and never trained on.

    ``prompts`` is as in ``[train]``, empty for none; a function is always called for iteration 0, so that
    prompts and seeds are the same each time.  It happens before every iteration whose number ``every``
    divides, and after the last.
    """

    prompts: str = ""
    groups: Count = 16
    every: Count = 10


class OptimizerTable(Struct, frozen=True):
    """``[train.optimizer]``: AdamW.

    The rate rises over ``warmup`` updates to ``learning_rate`` and falls linearly to 0 at update ``decay``;
    0 means that it does not.  A gradient whose norm is above ``max_grad_norm`` is shortened to that.
    """

    learning_rate: Positive = 1e-6
    beta1: Share = 0.9
    beta2: Share = 0.95
    weight_decay: NotNegative = 0.0
    warmup: OwnCount = 0
    decay: OwnCount = 0
    max_grad_norm: Positive = 1.0

    def rate(self, update: int) -> float:
        """Return the learning rate of an update, counted from 0."""
        rate = self.learning_rate
        if self.warmup:
            rate *= min(1.0, (update + 1) / self.warmup)
        if self.decay:
            rate *= max(0.0, 1 - update / self.decay)
        return rate


class TorchTable(Struct, frozen=True):
    """``[train.torch]``: the trainer ``torch``, one process, and the ranks of ``megatron``; in float32.

    A micro-batch holds ``micro_tokens``; ``packed`` lays its samples out in one row, for attention that
    needs no mask to keep them apart, as on GPUs.  Losses move by rounding with any of these.
    """

    device: str = "cpu"
    threads: Count = 1
    micro_tokens: Count = 2048
    packed: bool = False


class TrackingTable(Struct, frozen=True):
    """``[train.tracking]``: where the metrics go beside ``metrics.jsonl``.

    ``tensorboard`` writes event files into ``tensorboard/``; ``wandb`` is a project of Weights & Biases,
    empty for none.
    """

    tensorboard: bool = False
    wandb: str = ""


class MegatronTable(Struct, frozen=True):
    """``[train.megatron]``: the trainer ``megatron``, and how it shares the work out over processes.

    ``tensor_parallel`` ranks share each layer, ``pipeline_parallel`` stages the layers, and
    ``data_parallel`` replicas the micro-batches; there are as many ranks as their product, on one machine.
    Where no rank gets any further for ``timeout_s``, in a micro-batch or in an exchange, training ends.
    Device, threads of a rank and micro-batches are those of ``[train.torch]``.
    """

    tensor_parallel: Parallel = 1
    pipeline_parallel: Parallel = 1
    data_parallel: Parallel = 1
    timeout_s: Seconds = 600.0

    @property
    def ranks(self) -> int:
        """How many processes the layout has."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


class TrainTable(Struct, frozen=True):
    """``[train]``: what to train on, for how long, and with which trainer.

    ``prompts`` is a file of JSON lines, of which each iteration takes the next ``groups``, or
    ``FILE.py:FUNCTION``, a function of the iteration, ``groups`` and the seed that returns such records.
    ``reward`` is ``FILE.py:FUNCTION`` or ``package.module:FUNCTION``: it takes a ``seer_rl.Response`` and
    returns a number.  ``model`` is the directory of the first weights; empty for the engine's.  ``trainer``
    is ``torch``, ``megatron`` or names a factory.  Paths are relative to the config file.

    ``weights`` is how new ones get to the engines: by the directory ``weights/`` beside the metrics, or
    in memory, which only engines on the trainer's machine can read.

    A ``colocated`` trainer shares the engines' devices: they sleep while it trains.

    A ``journal`` keeps the tokens of rollouts since the last checkpoint: those of a response are on disk, or
    with the operating system, before it counts as finished.

    Each ``save_every`` iterations a checkpoint is written, of which the last ``keep`` stay.  Training stops
    where engine and trainer differ by more than ``max_dlogp`` nats on average, 0 for no limit: then the
    engines do not have the trainer's weights.
    """

    prompts: str
    reward: str
    iterations: Count = 100
    groups: Count = 16
    model: str = ""
    trainer: str = "torch"
    weights: Literal["directory", "shared_memory"] = "directory"
    colocated: bool = False
    journal: Literal["disk", "system", "none"] = "disk"
    save_every: Count = 1
    keep: Count = 2
    max_dlogp: NotNegative = 0.01
    rewards: RewardsTable = RewardsTable()
    loss: LossTable = LossTable()
    evaluation: EvaluationTable = EvaluationTable()
    optimizer: OptimizerTable = OptimizerTable()
    torch: TorchTable = TorchTable()
    tracking: TrackingTable = TrackingTable()
    megatron: MegatronTable = MegatronTable()


def engine_models(config: Config) -> dict[str, Path]:
    """Return the directories of the engines' models, by the engines' names; without those that have none."""
    names = {engine: config.engine.get(engine, {}).get("model", "") for engine in config.seer.engines}
    return {
        engine: (config.base_dir / name).resolve()
        for engine, name in names.items()
        if isinstance(name, str) and name
    }


def first_model(table: TrainTable, config: Config) -> Path:
    """Return the directory of the first weights.

    Raises:
        ConfigError: none is named.
    """
    if table.model:
        return (config.base_dir / table.model).resolve()
    models = engine_models(config)
    if config.seer.engines[0] not in models:
        raise ConfigError("[train].model is not given and the engine has none; name the first weights")
    return models[config.seer.engines[0]]


def load_training(
    path: Path, overrides: Iterable[str] = (), without: Iterable[str] = ()
) -> tuple[TrainTable, Config]:
    """Read a config with a ``[train]`` table; arguments are those of ``seer_core.load_config``.

    Raises:
        ConfigError: as there.
    """
    tree = read_toml(path)
    if not isinstance(tree.get("train"), dict):
        raise ConfigError(f"{path} has no [train] table; add one with `prompts` and `reward`")
    # The core refuses unknown tables but for those under [plugin], so [train] passes through it there: then
    # --set means the same for both.
    plugin = tree.setdefault("plugin", {})
    if isinstance(plugin, dict):
        plugin["train"] = tree.pop("train")
    renamed = [f"plugin.{text}" if text.startswith("train.") else text for text in overrides]
    config = make_config(tree, renamed, without, base_dir=path.parent, origin=str(path))
    plugins = dict(config.plugin)
    table = structure(plugins.pop("train"), TrainTable, "train")
    return table, msgspec.structs.replace(config, plugin=plugins)
