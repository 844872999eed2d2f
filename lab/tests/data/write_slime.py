"""Write ``slime`` beside this file by slime's own function: two rollouts and an evaluation."""

import random
from pathlib import Path

import torch
from slime.observability.rollout_data_utils import save_debug_rollout_data
from slime.utils.types import Sample

chance = random.Random(7)
template = str(Path(__file__).parent / "slime" / "rollout_{rollout_id}.pt")


def sample(group, index, prompt_tokens, response_tokens, status):
    """Return a response as slime leaves it after its reward."""
    return Sample(
        group_index=group,
        index=index,
        prompt=f"question {group}",
        tokens=[chance.randrange(50) for _ in range(prompt_tokens + response_tokens)],
        response="a" * response_tokens,
        response_length=response_tokens,
        reward=1.0,
        rollout_log_probs=[-0.5] * response_tokens,
        rollout_routed_experts=torch.zeros((prompt_tokens + response_tokens - 1, 2, 2), dtype=torch.int32),
        status=status,
    )


for rollout_id in (0, 1):
    samples = []
    for group in range(3):
        for _ in range(4):
            tokens = chance.randrange(1, 40)
            status = Sample.Status.TRUNCATED if tokens > 35 else Sample.Status.COMPLETED
            samples.append(sample(3 * rollout_id + group, len(samples), 5 + group, tokens, status))
    samples[5].status = Sample.Status.ABORTED
    save_debug_rollout_data(template, samples, rollout_id=rollout_id, evaluation=False)
evaluated = {"arithmetic": {"samples": [sample(None, 0, 5, 900, Sample.Status.COMPLETED)]}}
save_debug_rollout_data(template, evaluated, rollout_id=1, evaluation=True)
