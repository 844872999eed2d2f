"""Train the tiny reasoner by TRL's GRPOTrainer on Seer's rollouts: two vLLM engines, on a CPU."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # `rollout_func` may change, which TRL warns of each time

import torch
from datasets import Dataset
from seer_session import Session
from seer_trl import SeerRollout
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[1] / "tiny_reasoner"))

import task

CONFIG = Path(__file__).with_name("rollout.toml")
MODEL = Path(task.__file__).with_name("weights")


def reward(completions, metadata, **_):
    """Return 1 for each completion that ends in the right answer, else 0."""
    return [task.reward(facts, text) for facts, text in zip(metadata, completions, strict=True)]


def train(session, out, *, steps=3, groups=4, responses=8, max_tokens=512, **settings):
    """Train for some steps, each on so many groups of responses, and return the trainer.

    ``settings`` are more of GRPOConfig's.
    """
    rows = task.prompt_rows(steps * groups, responses, seed=77)
    args = GRPOConfig(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=groups * responses,
        num_generations=responses,
        max_completion_length=max_tokens,
        learning_rate=1e-4,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **settings,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        train_dataset=Dataset.from_list(
            [{"prompt": row["prompt"], "metadata": row["metadata"]} for row in rows]
        ),
        reward_funcs=reward,
        rollout_func=SeerRollout(session, args),  # all that Seer needs
        args=args,
    )
    trainer.train()
    return trainer


def main() -> None:
    """Train, save the model, and write down what each step logged."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="example: python examples/trl/train.py --steps 3 --out out/trl"
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--groups", type=int, default=4, help="prompts of a step (default 4)")
    parser.add_argument("--responses", type=int, default=8, help="responses to a prompt (default 8)")
    parser.add_argument("--max-tokens", type=int, default=512, help="of a response (default 512)")
    parser.add_argument("--out", type=Path, default=Path("out/trl"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write TRL's log there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {"steps": args.steps, "groups": args.groups, "responses": args.responses}
    with Session(CONFIG) as session:
        trainer = train(session, args.out, **sizes, max_tokens=args.max_tokens)
        trainer.save_model()
    if args.json:
        args.json.write_text(json.dumps(trainer.state.log_history, indent=1), "utf-8")


if __name__ == "__main__":
    main()
