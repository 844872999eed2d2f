"""A small model, a tokenizer of numbers, simulated engines, and a trainer of TRL."""

import os

import pytest
import torch

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

VOCAB = 512


@pytest.fixture
def config(config):
    """Return the config of simulated engines, with the vocabulary of the tokenizer."""
    text = config.read_text("utf-8").replace("[engine.sim]", f"[engine.sim]\nvocab_size = {VOCAB}")
    config.write_text(text, "utf-8")
    return config


@pytest.fixture(scope="session")
def tokenizer():
    """Return a tokenizer whose words are the numbers of their tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(VOCAB)}
    whole = Tokenizer(models.WordLevel(words, unk_token="0"))
    whole.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "{% for message in messages %}7 {{ message.content }} {% endfor %}8"
    return PreTrainedTokenizerFast(
        tokenizer_object=whole, pad_token="0", eos_token="2", chat_template=template
    )


def _make_model():
    """Return a model that is not trained, always the same."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            tie_word_embeddings=True,
        )
    )


@pytest.fixture
def make_model():
    return _make_model


@pytest.fixture
def make_args(tmp_path):
    """Return a function that makes a GRPOConfig: three groups of four a step, and settings beside it."""
    from trl import GRPOConfig

    def make(**settings):
        return GRPOConfig(
            **{
                "output_dir": str(tmp_path / "out"),
                "max_steps": 2,
                "per_device_train_batch_size": 12,
                "per_device_eval_batch_size": 6,
                "num_generations": 4,
                "max_completion_length": 16,
                "learning_rate": 1e-3,
                "use_cpu": True,
                "bf16": False,
                "gradient_checkpointing": False,
                "logging_steps": 1,
                "report_to": [],
                "save_strategy": "no",
                "disable_tqdm": True,
                **settings,
            }
        )

    return make


@pytest.fixture
def make_trainer(make_args, tokenizer):
    """Return a function that makes a trainer of a GRPOConfig with these settings."""
    from datasets import Dataset
    from transformers.utils import logging
    from trl import GRPOTrainer

    logging.disable_progress_bar()

    def make(rollout, prompts=None, peft_config=None, **settings):
        def reward(completion_ids, **_):
            return [float(ids[0] % 2) for ids in completion_ids]

        texts = [f"{number} 9" for number in range(3, 27)]
        return GRPOTrainer(
            model=_make_model(),
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"prompt": texts if prompts is None else prompts}),
            eval_dataset=Dataset.from_dict({"prompt": texts[:3]}),
            reward_funcs=reward,
            rollout_func=rollout,
            peft_config=peft_config,
            args=make_args(**settings),
        )

    return make
