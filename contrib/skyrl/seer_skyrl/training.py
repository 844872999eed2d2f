"""SkyRL's experiment on Seer's engines, with the generator and the trainer that drive them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from seer_journal import DiskJournal
from seer_session import Sampling, Session
from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.generators.base import GeneratorInput, GeneratorOutput
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl.train.trainer import RayPPOTrainer

from seer_core.errors import ConfigError
from seer_skyrl.engines import SeerEngines, sampling

__all__ = ["SeerConfig", "SeerExp", "SeerGenerator", "SeerTrainer", "check"]


@dataclass
class SeerConfig(SkyRLTrainConfig):
    """SkyRL's options, and two more."""

    seer_config: str = ""
    """Path of a config for `seer run`: which engines, which model, which plug-ins."""
    seer_journal: str = ""
    """Directory of a journal, from which a run that died in a rollout goes on with it; empty for none."""


class SeerGenerator(SkyRLGymGenerator):
    """SkyRL's generator, which gives the engines the batch that they roll out."""

    async def generate(self, input_batch: GeneratorInput, disable_tqdm: bool = False) -> GeneratorOutput:
        """Roll a batch out through Seer; environments, rewards and masks are SkyRL's."""
        engines = self.inference_engine_client
        engines.batch = input_batch
        if self.generator_cfg.batched:
            return await super().generate(input_batch, disable_tqdm)
        async with engines.turn_by_turn(input_batch):
            return await super().generate(input_batch, disable_tqdm)


class SeerTrainer(RayPPOTrainer):
    """SkyRL's trainer, whose weights go to the engines in a directory."""

    def init_weight_sync_state(self) -> None:
        """Replace SkyRL's transfers of weights, whose receivers are its own engines."""
        self.dispatch.save_weights_for_sampler = self.send_weights

    async def send_weights(self, model_id: str | None = None) -> None:
        """Save the policy to ``seer_weights`` in the export path, and have the engines load it.

        Where they share devices with it, its memory is free before they take theirs.
        """
        directory = Path(self.cfg.trainer.export_path) / "seer_weights"
        self.dispatch.save_hf_model("policy", str(directory), self.tokenizer)
        self.dispatch._finish_weight_sync()
        await self.inference_engine_client.load(directory, self.global_step)


class SeerExp(BasePPOExp):
    """SkyRL's experiment on Seer's engines, which live as long as it runs."""

    session: Session
    """The session that rolls out."""

    def run(self) -> None:
        """Start the engines, train, stop them."""
        check(self.cfg)
        with ExitStack() as stack:
            journal = None
            if self.cfg.seer_journal:
                journal = stack.enter_context(DiskJournal.of_session(self.cfg.seer_journal))
            session = Session(self.cfg.seer_config, journal=journal)
            session.runtime.refuse_environment("the adapter for SkyRL")
            self.session = stack.enter_context(session)
            super().run()

    def get_inference_client(self) -> SeerEngines:
        """Return Seer's engines, asleep where they share devices with the trainer."""
        if self.cfg.trainer.placement.colocate_all:
            self.session.sleep()
        return SeerEngines(
            self.session,
            self.tokenizer,
            self.cfg.trainer.policy.model.path,
            replays_routing=self.cfg.generator.inference_engine.enable_return_routed_experts,
        )

    def get_generator(
        self, cfg: SeerConfig, tokenizer: Any, inference_engine_client: SeerEngines
    ) -> SeerGenerator:
        """Return a ``SeerGenerator``."""
        return SeerGenerator(
            generator_cfg=cfg.generator,
            skyrl_gym_cfg=cfg.environment.skyrl_gym,
            inference_engine_client=inference_engine_client,
            tokenizer=tokenizer,
        )

    def get_trainer(self, *args: Any, **options: Any) -> SeerTrainer:
        """Return a ``SeerTrainer``."""
        return SeerTrainer(*args, **options)


def check(cfg: SeerConfig) -> None:
    """Make sure that SkyRL's options ask for what Seer's rollouts can give.

    Raises:
        ConfigError: they do not, and what to change.
    """
    trainer, generator = cfg.trainer, cfg.generator
    if not cfg.seer_config:
        raise ConfigError("Seer's config is not named; give seer_config=/path/to/rollout.toml")
    if generator.vision_language_generator:
        raise ConfigError(
            "Seer rolls out text alone for SkyRL, whose generator brings no images, but tensors that a vLLM"
            " server has made of them; leave out generator.vision_language_generator"
        )
    if trainer.fully_async.enabled:
        raise ConfigError("Seer's rollouts are of one version of weights; leave out trainer.fully_async")
    if trainer.policy.model.lora.rank > 0:
        raise ConfigError("Seer's engines load whole models; leave out trainer.policy.model.lora")
    if "://" in trainer.export_path:
        raise ConfigError(
            f"Seer's engines load the weights from a directory, and trainer.export_path is"
            f" {trainer.export_path}; give one that all machines share"
        )
    backend = generator.inference_engine.backend
    for params in (generator.sampling_params, generator.eval_sampling_params):
        sampling(get_sampling_params_for_backend(backend, params))
    params = generator.sampling_params
    trained = sampling(get_sampling_params_for_backend(backend, params))
    wanted = msgspec.convert({name: trained[name] for name in trained if name != "max_tokens"}, Sampling)
    if params.logprobs is not None and not wanted.raw:
        raise ConfigError(
            f"sampled by {wanted.described}, the engines' log-probs, the model's own, are not those that"
            " SkyRL trains on; sample at temperature 1, top_p 1 and top_k -1, or set"
            " generator.sampling_params.logprobs=null"
        )
