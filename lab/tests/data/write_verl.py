"""Write ``verl`` beside this file by verl's own function: two steps of three prompts with four responses."""

import random
from pathlib import Path

from verl.trainer.ppo.ray_trainer import RayPPOTrainer

chance = random.Random(7)
for step in (1, 2):
    asked = [f"{first} + {chance.randrange(1000)} =" for first in (3, 40, 512)]
    inputs = [prompt for prompt in asked for _ in range(4)]
    chance.shuffle(inputs)  # as balancing over ranks leaves them
    outputs = [" ".join(str(chance.randrange(10**4)) for _ in range(chance.randrange(40))) for _ in inputs]
    scores = [float(chance.random() < 0.5) for _ in inputs]
    RayPPOTrainer._write_generations(
        inputs,
        outputs,
        [None] * len(inputs),
        scores,
        {"acc": scores, "length_reward": [float("nan")] * len(inputs)},
        str(Path(__file__).parent / "verl"),
        step,
    )
