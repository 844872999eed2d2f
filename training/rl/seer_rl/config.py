"""The ``[train]`` tables of a config, beside those that say how to roll out."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from seer_host.config_files import make_config, read_toml
from seer_host.tables import structure
from seer_session import Config

from seer_core.errors import ConfigError
from seer_core.plugins.config_types import NotNegative, Positive, Seconds, Share

__all__ = [
    "EvaluationTable",
    "LoraTable",
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
Groups = Annotated[int, Meta(ge=1, le=1_000_000)]
OwnCount = Annotated[int, Meta(ge=0)]
Parallel = Annotated[int, Meta(ge=1, le=1024)]


class RewardsTable(Struct, frozen=True):
    """``[train.rewards]``: the processes that compute rewards."""

    workers: Annotated[int, Meta(ge=1, le=1024)] = 1
    """How many processes compute rewards."""
    timeout_s: Seconds = 10.0
    """How long the reward of one response may take."""


class LossTable(Struct, frozen=True):
    """``[train.loss]``: a token-level policy gradient with clipping; see ``seer_rl.losses``."""

    clip_low: Share = 0.2
    """How far the ratio of new and old policy may fall below 1 before it is clipped."""
    clip_high: NotNegative = 0.28
    """How far the ratio of new and old policy may rise above 1 before it is clipped."""
    kl: NotNegative = 0.0
    """The weight of the distance from the first weights; above 0 the trainer keeps those."""
    scale: bool = True
    """Whether advantages are divided by the standard deviation of their group."""
    epochs: Count = 1
    """Updates that are made of one iteration's batch. With one, old and new policy are the same and nothing
    is clipped.
    """


class EvaluationTable(Struct, frozen=True):
    """``[train.evaluation]``: held-out prompts, scored by the same reward and never trained on."""

    prompts: str = ""
    """A file or a function, as in ``[train]``; empty for none. A function is always called for iteration 0,
    so that prompts and seeds are the same each time.
    """
    groups: Groups = 16
    """How many prompts are evaluated."""
    every: Count = 10
    """Prompts are evaluated before every iteration whose number this divides, and after the last."""


class OptimizerTable(Struct, frozen=True):
    """``[train.optimizer]``: AdamW."""

    learning_rate: Positive = 1e-6
    """The learning rate after the warm-up."""
    beta1: Share = 0.9
    """AdamW's decay of the mean of gradients."""
    beta2: Share = 0.95
    """AdamW's decay of the mean of squared gradients."""
    weight_decay: NotNegative = 0.0
    """AdamW's decay of weights."""
    warmup: OwnCount = 0
    """The updates over which the rate rises to ``learning_rate``; 0 begins with it."""
    decay: OwnCount = 0
    """The update at which the rate, which falls linearly, is 0; 0 means that it does not fall."""
    max_grad_norm: Positive = 1.0
    """A gradient whose norm is larger is shortened to this."""

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

    Losses move by rounding with any of these.
    """

    device: str = "cpu"
    """The torch device on which the trainer computes."""
    threads: Count = 1
    """Threads of the trainer on a CPU."""
    micro_tokens: Count = 2048
    """The tokens of a micro-batch."""
    packed: bool = False
    """Whether a micro-batch lays its samples out in one row, for attention that keeps them apart without a
    mask, as on GPUs.
    """


class LoraTable(Struct, frozen=True):
    """``[train.lora]``: the trainer ``torch`` trains and sends an adapter of the first weights, by PEFT."""

    rank: Annotated[int, Meta(ge=0, le=512)] = 0
    """The rank of each pair of factors; 0 means that all weights are trained."""
    alpha: Positive = 16.0
    """The product of both factors counts this much, divided by the rank."""
    targets: list[str] = []
    """The modules that have factors, by the ends of their names; empty for every matrix but the head's."""


class TrackingTable(Struct, frozen=True):
    """``[train.tracking]``: where the metrics go beside ``metrics.jsonl``."""

    tensorboard: bool = False
    """Whether event files are written into ``tensorboard/``."""
    wandb: str = ""
    """The project of Weights & Biases; empty for none."""
    mlflow: str = ""
    """The experiment of MLflow, where ``MLFLOW_TRACKING_URI`` says; empty for none."""


class MegatronTable(Struct, frozen=True):
    """``[train.megatron]``: the trainer ``megatron``, and how it shares the work out over processes.

    There are as many ranks as the product of the three layouts, on one machine.  Device, threads of a rank
    and micro-batches are those of ``[train.torch]``.
    """

    tensor_parallel: Parallel = 1
    """The ranks that share each layer."""
    pipeline_parallel: Parallel = 1
    """The stages among which the layers are shared out."""
    data_parallel: Parallel = 1
    """The replicas among which the micro-batches are shared out."""
    timeout_s: Seconds = 600.0
    """Training ends where no rank gets any further for so long, in a micro-batch or in an exchange."""

    @property
    def ranks(self) -> int:
        """How many processes the layout has."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


class TrainTable(Struct, frozen=True):
    """``[train]``: the prompts to train on, for how long, and with which trainer.  Paths are relative to the
    config file.
    """

    prompts: str
    """A file of JSON lines, of which each iteration takes the next ``groups``, or ``FILE.py:FUNCTION``, a
    function of the iteration, ``groups`` and the seed that returns such records.
    """
    reward: str = ""
    """``FILE.py:FUNCTION`` or ``package.module:FUNCTION``: it takes a ``seer_rl.Response`` and returns a
    number, to which the rewards of an environment are added. Empty leaves rewards to the environment.
    """
    environment: str = ""
    """``FILE.py:CLASS`` or ``package.module:CLASS``: an environment, made without arguments, that answers
    the turns of responses; empty for none, or for that of a plug-in.
    """
    iterations: Count = 100
    """How many iterations are trained."""
    groups: Groups = 16
    """The prompts of one iteration."""
    model: str = ""
    """The directory of the first weights; empty for the engine's."""
    trainer: str = "torch"
    """``torch``, ``megatron``, or a factory of your own, as ``FILE.py:CLASS`` or ``package.module:CLASS``."""
    weights: Literal["directory", "shared_memory"] = "directory"
    """How new weights get to the engines: by the directory ``weights/`` beside the metrics, or in memory,
    which engines on the trainer's machine map, and other nodes of a cluster are sent.
    """
    colocated: bool = False
    """Whether the trainer shares the engines' devices: they sleep while it trains."""
    journal: Literal["disk", "system", "none"] = "disk"
    """Whether the tokens of a response are on disk, or with the operating system, before it counts as
    finished. The journal keeps those of rollouts since the last checkpoint; ``none`` keeps nothing.
    """
    save_every: Count = 1
    """A checkpoint is written after so many iterations."""
    keep: Count = 2
    """How many of the last checkpoints stay."""
    max_dlogp: NotNegative = 0.01
    """Training stops where the log-probs of engine and trainer differ by more nats on average: then the
    engines do not have the trainer's weights. 0 means no limit.
    """
    replay_routing: bool = False
    """Whether a mixture of experts takes in training the experts that the engine took (routing replay, R3).
    The engine must answer them: on SGLang and vLLM with ``engine_args.enable_return_routed_experts = true``,
    on servers of SGLang's if prompts ask for them.
    """
    rewards: RewardsTable = RewardsTable()
    """The processes that compute rewards."""
    loss: LossTable = LossTable()
    """The policy gradient."""
    evaluation: EvaluationTable = EvaluationTable()
    """Held-out prompts."""
    optimizer: OptimizerTable = OptimizerTable()
    """The optimizer."""
    torch: TorchTable = TorchTable()
    """The trainer ``torch``."""
    lora: LoraTable = LoraTable()
    """An adapter, in the place of all weights."""
    tracking: TrackingTable = TrackingTable()
    """Where metrics go besides the file."""
    megatron: MegatronTable = MegatronTable()
    """The trainer ``megatron``."""


def engine_models(config: Config) -> dict[str, Path]:
    """Return the directories of the engines' models, by the engines' names; without those that have none."""
    names = {engine: config.engine.get(engine, {}).get("model", "") for engine in config.seer.engines}
    return {
        engine: Path(os.path.realpath(config.base_dir / name))
        for engine, name in names.items()
        if isinstance(name, str) and name
    }


def first_model(table: TrainTable, config: Config) -> Path:
    """Return the directory of the first weights.

    Raises:
        ConfigError: none is named.
    """
    if table.model:
        return Path(os.path.realpath(config.base_dir / table.model))
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
