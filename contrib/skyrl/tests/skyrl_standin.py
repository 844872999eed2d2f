"""The parts of SkyRL that the adapter uses, as small as they can be, for where SkyRL itself is not installed.

With a checkout on ``PYTHONPATH`` the tests run on SkyRL's own modules.
"""

import asyncio
import importlib
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

from skyrl_client_standin import RemoteInferenceClient


@dataclass
class TrajectoryID:
    instance_id: str
    repetition_id: int


@dataclass
class BatchMetadata:
    global_step: int
    training_phase: str


def prepare_generator_input(prompts, n_samples_per_prompt, sampling_params, env_class, training_phase, step):
    rows = [(prompt, number) for prompt in prompts for number in range(n_samples_per_prompt)]
    whole = {
        "prompts": [prompt["prompt"] for prompt, _ in rows],
        "env_classes": [prompt["env_class"] or env_class for prompt, _ in rows],
        "env_extras": [dict(prompt["env_extras"]) for prompt, _ in rows],
        "sampling_params": sampling_params,
        "trajectory_ids": [TrajectoryID(prompt["uid"], number) for prompt, number in rows],
        "batch_metadata": BatchMetadata(step, training_phase),
    }
    return whole, [prompt["uid"] for prompt, _ in rows]


def _abstract(self, *args, **options):
    raise NotImplementedError


class InferenceEngineInterface(ABC):
    @property
    @abstractmethod
    def model_name(self): ...

    generate = abstractmethod(_abstract)
    get_endpoint_url = abstractmethod(_abstract)
    chat_completion = abstractmethod(_abstract)
    render_chat_completion = abstractmethod(_abstract)
    completion = abstractmethod(_abstract)
    wake_up = abstractmethod(_abstract)
    sleep = abstractmethod(_abstract)
    init_weight_update_communicator = abstractmethod(_abstract)
    update_named_weights = abstractmethod(_abstract)
    teardown = abstractmethod(_abstract)
    reset_prefix_cache = abstractmethod(_abstract)
    pause_generation = abstractmethod(_abstract)
    resume_generation = abstractmethod(_abstract)
    finish_session = abstractmethod(_abstract)
    get_world_size = abstractmethod(_abstract)


@dataclass
class SamplingParams:
    max_generate_length: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = -1
    logprobs: int | None = 1
    stop: list | None = None
    additional_kwargs: dict | None = None


def get_sampling_params_for_backend(backend, params):
    return {
        "min_tokens": 1,
        "skip_special_tokens": True,
        "include_stop_str_in_output": True,
        "max_tokens": params.max_generate_length,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "logprobs": params.logprobs,
        "stop": params.stop,
        **(params.additional_kwargs or {}),
    }


def _trainer():
    return SimpleNamespace(
        export_path="",
        placement=SimpleNamespace(colocate_all=True),
        fully_async=SimpleNamespace(enabled=False),
        policy=SimpleNamespace(model=SimpleNamespace(path="", lora=SimpleNamespace(rank=0))),
    )


def _generator():
    return SimpleNamespace(
        batched=False,
        vision_language_generator=False,
        n_samples_per_prompt=5,
        inference_engine=SimpleNamespace(backend="vllm", enable_return_routed_experts=False),
        sampling_params=SamplingParams(),
        eval_sampling_params=SamplingParams(temperature=0.0),
    )


@dataclass
class SkyRLTrainConfig:
    trainer: SimpleNamespace = field(default_factory=_trainer)
    generator: SimpleNamespace = field(default_factory=_generator)
    environment: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(skyrl_gym=None))

    @classmethod
    def from_cli_overrides(cls, overrides):
        made = cls()
        for path, value in overrides.items():
            place = made
            *parts, last = path.split(".")
            for part in parts:
                place = getattr(place, part)
            setattr(place, last, value)
        return made


class BaseTextEnv:
    def init(self, prompt):
        return prompt, {}

    def get_metrics(self):
        return {}


_environments = {}


def register(id, entry_point):
    _environments[id] = entry_point


class SkyRLGymGenerator:
    def __init__(self, generator_cfg, skyrl_gym_cfg, inference_engine_client, tokenizer):
        self.generator_cfg = generator_cfg
        self.inference_engine_client = inference_engine_client
        self.tokenizer = tokenizer

    async def agent_loop(self, prompt, environment, sampling_params, trajectory):
        session = f"{trajectory.instance_id}_{trajectory.repetition_id}"
        ids = self.tokenizer.apply_chat_template(
            environment.init(prompt)[0], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        found = {"prompt": ids, "mask": [], "logprobs": [], "rewards": [], "experts": None}
        step = {"done": False}
        try:
            while not step["done"]:
                output = await self.inference_engine_client.generate(
                    {"prompt_token_ids": [ids], "session_ids": [session], "sampling_params": sampling_params},
                    model=None,
                )
                [tokens], [logprobs] = output["response_ids"], output["response_logprobs"]
                if (experts := output["rollout_expert_indices"]) is not None:
                    found["experts"] = experts[0]  # of the whole text so far
                step = environment.step(output["responses"][0])
                texts = [] if step["done"] else [each["content"] for each in step["observations"]]
                answer = self.tokenizer.encode(" ".join(texts), add_special_tokens=False)
                ids = [*ids, *tokens, *answer]
                found["mask"] += [1] * len(tokens) + [0] * len(answer)
                found["logprobs"] += logprobs + [0.0] * len(answer)
                found["rewards"] += [0.0] * (len(tokens) - 1) + [step["reward"]] + [0.0] * len(answer)
        finally:
            await self.inference_engine_client.finish_session(session)
        return found | {"response": ids[len(found["prompt"]) :], "reason": output["stop_reasons"][0]}

    async def generate(self, batch, disable_tqdm=False):
        environments, prompts = [], []
        for name, extras, prompt in zip(
            batch["env_classes"], batch["env_extras"], batch["prompts"], strict=True
        ):
            module, _, made = _environments[name].partition(":")
            environments.append(getattr(importlib.import_module(module), made)(extras=extras))
            prompts.append(prompt)
        if not self.generator_cfg.batched:
            loops = zip(prompts, environments, batch["trajectory_ids"], strict=True)
            params = batch["sampling_params"]
            found = await asyncio.gather(*(self.agent_loop(*each[:2], params, each[2]) for each in loops))
            names = {
                "prompt_token_ids": "prompt",
                "response_ids": "response",
                "rewards": "rewards",
                "loss_masks": "mask",
                "stop_reasons": "reason",
                "rollout_logprobs": "logprobs",
                "rollout_expert_indices": "experts",
            }
            return {name: [each[key] for each in found] for name, key in names.items()}
        prompts = [one.init(prompt)[0] for one, prompt in zip(environments, prompts, strict=True)]
        ids = self.tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        output = await self.inference_engine_client.generate(
            {"prompt_token_ids": ids, "sampling_params": batch["sampling_params"]}, model=None
        )
        texts = zip(environments, output["responses"], strict=True)
        return {
            "prompt_token_ids": ids,
            "response_ids": output["response_ids"],
            "rewards": [environment.step(text)["reward"] for environment, text in texts],
            "loss_masks": [[1] * len(tokens) for tokens in output["response_ids"]],
            "stop_reasons": output["stop_reasons"],
            "rollout_logprobs": output["response_logprobs"],
            "rollout_expert_indices": output["rollout_expert_indices"],
        }


class RayPPOTrainer:
    pass


class BasePPOExp:
    def run(self):
        trainer = self._setup_trainer()
        asyncio.run(trainer.train())


MODULES = {
    "skyrl": (),
    "skyrl.backends": (),
    "skyrl.backends.skyrl_train": (),
    "skyrl.backends.skyrl_train.inference_servers": (),
    "skyrl.backends.skyrl_train.inference_servers.base": (InferenceEngineInterface,),
    "skyrl.backends.skyrl_train.inference_servers.engine_utils": (get_sampling_params_for_backend,),
    "skyrl.backends.skyrl_train.inference_servers.remote_inference_client": (RemoteInferenceClient,),
    "skyrl.train": (),
    "skyrl.train.config": (SamplingParams, SkyRLTrainConfig),
    "skyrl.train.entrypoints": (),
    "skyrl.train.entrypoints.main_base": (BasePPOExp,),
    "skyrl.train.generators": (),
    "skyrl.train.generators.base": (BatchMetadata, TrajectoryID),
    "skyrl.train.generators.skyrl_gym_generator": (SkyRLGymGenerator,),
    "skyrl.train.generators.utils": (prepare_generator_input,),
    "skyrl.train.trainer": (RayPPOTrainer,),
    "skyrl_gym": (register,),
    "skyrl_gym.envs": (),
    "skyrl_gym.envs.base_text_env": (BaseTextEnv,),
}
DICTIONARIES = {
    "skyrl.backends.skyrl_train.inference_servers.base": ("InferenceEngineInput", "InferenceEngineOutput"),
    "skyrl.train.generators.base": ("GeneratorInput", "GeneratorOutput"),
}


def install():
    """Register the stand-in under SkyRL's module names."""
    for name, contents in MODULES.items():
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = []
        for each in contents:
            setattr(module, each.__name__, each)
        for each in DICTIONARIES.get(name, ()):
            setattr(module, each, dict)
