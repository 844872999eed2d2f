"""The loss of `seer_rl` against that of TRL's GRPOTrainer, on the same batch: value and gradient.

A small model, responses of several lengths, old log-probs that the model has moved away from, so that tokens
are clipped, and a penalty.  TRL's loss type is `bnpo`, the mean over all tokens.
"""

from __future__ import annotations

import random
import tempfile

import pytest
import torch
from seer_rl.batches import micro_batches
from seer_rl.losses import clipped_policy_loss, kl_penalty, token_logprobs
from seer_rl.trainer import Sample
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

LOW, HIGH, KL = 0.2, 0.28, 0.1


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_loss_and_gradient_are_those_of_trl():
    pytest.importorskip("trl", reason="TRL is not installed: `make setup` installs it")
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
        )
    )
    rng = random.Random(0)
    samples = []
    for number in range(6):
        prompt, response = ([rng.randrange(3, 64) for _ in range(count)] for count in (5, 4 + 3 * number))
        samples.append(Sample(prompt, response, [0.0] * len(response), (-1.0) ** number * (1 + number / 7)))
    [batch] = micro_batches(samples, 10_000, packed=False)
    with torch.no_grad():
        logits = model(batch.ids, position_ids=batch.positions).logits
        now = token_logprobs(batch.trained(logits), batch.targets)
    old, reference = (now + torch.randn(len(now)) * spread for spread in (0.4, 0.3))

    logits = model(batch.ids, position_ids=batch.positions).logits
    logprobs = token_logprobs(batch.trained(logits), batch.targets)
    per_token, clipped = clipped_policy_loss(logprobs, old, batch.advantages, clip_low=LOW, clip_high=HIGH)
    ours = (per_token + KL * kl_penalty(logprobs, reference)).sum() / len(logprobs)
    ours.backward()
    our_gradient = torch.cat([each.grad.flatten() for each in model.parameters()])
    model.zero_grad()

    theirs = trl_loss(model, samples, batch, old, reference)
    theirs.backward()
    their_gradient = torch.cat([each.grad.flatten() for each in model.parameters()])
    assert clipped.any()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    assert (our_gradient - their_gradient).norm() <= 1e-5 * their_gradient.norm()


def trl_loss(model, samples, batch, old, reference):
    """Return the loss that TRL computes."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from trl import GRPOConfig, GRPOTrainer

    words = {str(number): number for number in range(64)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")), pad_token="0", eos_token="2"
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        model.config._name_or_path = folder  # whence it takes its reference model
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=folder,
                loss_type="bnpo",
                beta=KL,
                epsilon=LOW,
                epsilon_high=HIGH,
                temperature=1.0,
                num_generations=2,
                per_device_train_batch_size=2,
                use_cpu=True,
                bf16=False,
                use_bias_correction_kl=False,
                report_to=[],
            ),
            train_dataset=Dataset.from_dict({"prompt": ["3", "4"]}),
            processing_class=tokenizer,
        )
    trainer.model.eval()  # or else it divides by micro-batches of a step that never was
    longest = max(len(each.response) for each in samples)
    # TRL pads on both sides; ours puts the longest first, theirs keeps the order.
    rows = sorted(samples, key=lambda each: len(each.prompt) + len(each.response), reverse=True)
    mask = torch.tensor([[int(i < len(each.response)) for i in range(longest)] for each in rows])

    def spread(values):
        table = torch.zeros(mask.shape)
        table[mask.bool()] = values
        return table

    inputs = {
        "prompt_ids": torch.tensor([each.prompt for each in rows]),
        "prompt_mask": torch.ones(len(rows), len(rows[0].prompt), dtype=torch.long),
        "completion_ids": torch.tensor(
            [[*each.response, *[0] * (longest - len(each.response))] for each in rows]
        ),
        "completion_mask": mask,
        "advantages": torch.tensor([each.advantage for each in rows]),
        "old_per_token_logps": spread(old),
        "ref_per_token_logps": spread(reference),
    }
    return trainer._compute_loss(trainer.model, inputs)
