"""The rollouts of verl's trainer, by verl's own classes on a server of Seer's, without training.

It runs in verl's environment; `seer serve examples/verl/rollout.toml` runs in Seer's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # Ray asks for it, on machines without a GPU

import numpy as np
import ray
import torch
from hydra import compose, initialize_config_module
from safetensors.torch import load_file
from verl.checkpoint_engine import CheckpointEngineManager
from verl.experimental.reward_loop import RewardLoopManager
from verl.protocol import DataProto
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.import_utils import load_class_from_fqn
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.llm_server import LLMServerManager

sys.path.insert(0, str(Path(__file__).parents[1] / "tiny_reasoner"))

import task

HERE = Path(__file__).parent
WEIGHTS = Path(task.__file__).with_name("weights")
ROLLOUT = "actor_rollout_ref.rollout"


def configure(url: str, *more: str) -> Any:
    """Return verl's config with the lines of ``docs/guides/verl.md``, for its trainer with ``DataProto``."""
    lines = [
        f"{ROLLOUT}.name=seer",
        f"+{ROLLOUT}.agent.agent_loop_manager_class=seer_verl.manager.AgentLoopManager",
        f"+{ROLLOUT}.engine_kwargs.seer.url={url}",
        f"{ROLLOUT}.tensor_model_parallel_size=1",
        "trainer.use_v1=False",
        "trainer.n_gpus_per_node=1",
        f"actor_rollout_ref.model.path={WEIGHTS}",
        # The reasoner is a Qwen3 whose tokenizer has no newline, which verl's chats for Qwen3 need.
        f"actor_rollout_ref.model.hf_config_path={HERE / 'verl_config'}",
        f"reward.custom_reward_function.path={HERE / 'reward.py'}",
        "reward.num_workers=1",
        f"{ROLLOUT}.agent.num_workers=2",
        f"{ROLLOUT}.prompt_length=32",
        *more,
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", lines)


def make_batch(rows: list[dict[str, Any]], responses: int, step: int) -> DataProto:
    """Return a batch as verl's trainer makes it of its data: each prompt's row repeated under one ``uid``."""
    rows = [row for row in rows for _ in range(responses)]
    columns = {
        "raw_prompt": [[{"role": "user", "content": row["prompt"]}] for row in rows],
        "uid": [row["prompt"] for row in rows],
        "data_source": ["tiny_reasoner" for _ in rows],
        "reward_model": [{"ground_truth": row["metadata"]["answer"]} for row in rows],
        "extra_info": [{} for _ in rows],
    }
    arrays = {}
    for name, values in columns.items():
        arrays[name] = np.empty(len(values), dtype=object)
        arrays[name][:] = values
    return DataProto.from_dict(
        tensors={"row": torch.arange(len(rows))}, non_tensors=arrays, meta_info={"global_steps": step}
    )


@ray.remote
class TrainerWorker:
    """Stands for a trainer's worker: it has the model's weights, and verl's rollout class sends them."""

    def __init__(self, config: Any) -> None:
        actor = config.actor_rollout_ref
        rollout = get_rollout_class(actor.rollout.name)
        self.rollout = rollout(config=actor.rollout, model_config=actor.model, device_mesh=None)
        self.weights = load_file(WEIGHTS / "model.safetensors")

    async def update_weights(self, step: int) -> None:
        """Wake the engines, and send them the weights after a step."""
        await self.rollout.resume(tags=["weights"])
        await self.rollout.update_weights(iter(self.weights.items()), global_steps=step)


class TrainingRollouts:
    """Servers, rewards, agent loops and weights, as verl's ``RayPPOTrainer`` makes them of its config."""

    def __init__(self, config: Any) -> None:
        trainer = TrainerWorker.remote(config)
        workers = SimpleNamespace(
            world_size=1,
            workers=[trainer],
            update_weights=lambda global_steps, mode: trainer.update_weights.remote(global_steps),
        )
        servers = LLMServerManager.create(config=config, worker_group=workers)
        rewards = RewardLoopManager(config)
        manager = load_class_from_fqn(config.actor_rollout_ref.rollout.agent.agent_loop_manager_class)
        self.loops = manager.create(
            config=config,
            llm_client=servers.get_client(),
            reward_loop_worker_handles=rewards.reward_loop_worker_handles,
        )
        self.engines = CheckpointEngineManager(
            config=omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine),
            actor_wg=workers,
            replicas=servers.get_replicas(),
        )

    def step(self, batch: DataProto) -> DataProto:
        """Roll out a batch; the engines sleep when it is over, and wake with the next step's weights."""
        step = batch.meta_info["global_steps"]
        self.engines.update_weights(step - 1)
        output = self.loops.generate_sequences(batch)
        self.engines.sleep_replicas()
        return output


def main() -> None:
    """Roll out some steps, and print what came back."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python examples/verl/rollout.py --url http://127.0.0.1:8000 --steps 2",
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where `seer serve` listens")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--groups", type=int, default=4, help="prompts of a step (default 4)")
    parser.add_argument("--responses", type=int, default=8, help="responses to a prompt (default 8)")
    parser.add_argument("--max-tokens", type=int, default=512, help="of a response (default 512)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tokens of each response there")
    args = parser.parse_args()
    config = configure(
        args.url, f"{ROLLOUT}.n={args.responses}", f"{ROLLOUT}.response_length={args.max_tokens}"
    )
    rows = list(task.prompt_rows(args.steps * args.groups, args.responses, seed=77))
    found = []
    ray.init(num_cpus=4, include_dashboard=False)
    try:
        rollouts = TrainingRollouts(config)
        for step in range(1, args.steps + 1):
            batch = make_batch(rows[(step - 1) * args.groups : step * args.groups], args.responses, step)
            began = time.monotonic()
            output = rollouts.step(batch)
            took = time.monotonic() - began
            masks = output.batch["response_mask"].bool()
            tokens = [ids[mask].tolist() for ids, mask in zip(output.batch["responses"], masks, strict=True)]
            reward = output.batch["rm_scores"].sum(dim=1).mean().item()
            weights = set(output.non_tensor_batch["min_global_steps"])
            print(
                f"step {step}: {len(tokens)} responses, {int(masks.sum()):,} tokens, {took:.1f} s,"
                f" mean reward {reward:.2f}, weights of step {', '.join(map(str, weights))}"
            )
            found += [
                {
                    "group_id": f"{step}-{row // args.responses}",
                    "index": row % args.responses,
                    "token_ids": ids,
                }
                for row, ids in enumerate(tokens)
            ]
    finally:
        ray.shutdown()
    if args.json:
        args.json.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main()
