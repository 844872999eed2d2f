"""Trainers and engines that do not fit together are refused before either has run."""

import json

import pytest
from seer_rl.config import load_training
from seer_rl.errors import TrainError
from seer_rl.model_fit import check_model_fit, experts_per_token

from seer_core.errors import ConfigError

CONFIG = """
[train]
prompts = "prompts.jsonl"
reward = "reward.py:reward"
model = "trainer"
[seer]
plugins = ["divided_rollout"]
engine = "vllm"
[engine.vllm]
model = "engine"
"""

MODEL = {"model_type": "qwen3", "hidden_size": 32, "tie_word_embeddings": True, "dtype": "float32"}


@pytest.fixture
def check(tmp_path):
    """Return a function that checks a trainer's model, and settings, against the engines' model."""

    def check(trainer=(), engine=(), overrides=(), tokens=96):
        for name, changes in (("trainer", trainer), ("engine", engine)):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "config.json").write_text(json.dumps(MODEL | dict(changes)), "utf-8")
        (tmp_path / "train.toml").write_text(CONFIG, "utf-8")
        check_model_fit(*load_training(tmp_path / "train.toml", overrides), tokens, 96)

    return check


def test_two_copies_of_a_model_fit(check):
    check()
    check(engine={"unrelated_key": 1})


@pytest.mark.parametrize(
    ("engine", "facts"),
    [
        ({"hidden_size": 64}, "hidden_size 32 and 64"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings True and False"),
        ({"text_config": {"hidden_size": 48}}, "hidden_size 32 and 48"),
        ({"model_type": "llama", "hidden_size": 8}, "model_type qwen3 and llama, hidden_size 32 and 8"),
    ],
)
def test_models_that_differ_are_refused_with_all_that_differs(check, engine, facts):
    with pytest.raises(TrainError, match=f"is not like the engines', .*: {facts}; give both the same model"):
        check(engine=engine)


def test_another_vocabulary_is_refused(check):
    with pytest.raises(TrainError, match="the trainer's model has 97 tokens and the engines' 96"):
        check(tokens=97)


def test_engines_in_half_precision_need_a_limit_that_they_can_keep(check):
    strict = "train.max_dlogp=1e-5"
    for engine, overrides in (({"dtype": "bfloat16"}, ()), ({}, ("engine.vllm.dtype=bfloat16",))):
        check(engine=engine, overrides=overrides)
        check(engine=engine, overrides=(*overrides, "train.max_dlogp=0"))
        with pytest.raises(TrainError, match=r"set \[engine.vllm\].dtype = \"float32\", or raise max_dlogp"):
            check(engine=engine, overrides=(*overrides, strict))
    check(engine={"dtype": "bfloat16"}, overrides=("engine.vllm.dtype=float32", strict))


def test_a_model_that_is_not_described_is_refused(check, tmp_path):
    check()
    (tmp_path / "engine" / "config.json").write_text("[", "utf-8")
    path = tmp_path / "train.toml"
    with pytest.raises(ConfigError, match="is no model's configuration"):
        check_model_fit(*load_training(path), 96, 96)
    (tmp_path / "engine" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json"):
        check_model_fit(*load_training(path), 96, 96)


def test_the_experts_of_a_token_are_those_of_the_text_part_of_the_trainer_s_model(check, tmp_path):
    check(trainer={"text_config": {"num_experts_per_tok": 4}})
    assert experts_per_token(*load_training(tmp_path / "train.toml")) == 4
    check()
    assert experts_per_token(*load_training(tmp_path / "train.toml")) is None
