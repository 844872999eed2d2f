"""Megatron-core's model: the same weights, log-probs and learning as that of transformers."""

import random

import pytest
import torch
from safetensors.torch import load_file
from seer_rl.batches import micro_batches
from seer_rl.config import OptimizerTable, TorchTable, TrainTable
from seer_rl.models import HuggingFaceModel
from seer_rl.torch_trainer import TorchTrainer
from seer_rl.trainer import Sample

from seer_core.errors import ConfigError

pytest.importorskip("megatron", reason="Megatron-core is not installed: `make setup` installs it")

pytestmark = pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning")  # its own business

TABLE = TrainTable("", "", optimizer=OptimizerTable(learning_rate=1e-3), torch=TorchTable(micro_tokens=64))


@pytest.fixture(scope="module")
def samples():
    rng = random.Random(3)
    found = []
    for number in range(6):
        prompt, response = ([rng.randrange(3, 512) for _ in range(count)] for count in (4, 5 + 4 * number))
        found.append(Sample(prompt, response, [0.0] * len(response), (-1.0) ** number * (1 + number / 7)))
    return found


def test_weights_go_through_megatron_and_back_bit_for_bit(other_model, tmp_path):
    from seer_rl.megatron import MegatronModel

    trained = MegatronModel(TABLE, other_model)
    trained.export(tmp_path)
    before, after = (load_file(folder / "model.safetensors") for folder in (other_model, tmp_path))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(before[name], tensor) for name, tensor in trained.tensors().items())
    assert (tmp_path / "tokenizer.json").exists()


def test_log_probs_are_those_of_transformers(other_model, samples):
    from seer_rl.megatron import MegatronModel

    [batch] = micro_batches(samples, 4096, packed=False)
    with torch.no_grad():
        ours = MegatronModel(TABLE, other_model).logprobs(batch)
        theirs = HuggingFaceModel(TABLE, other_model).logprobs(batch)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert len(ours) == sum(len(each.response) for each in samples)


def test_it_learns_what_the_trainer_torch_learns_and_the_same_each_time(other_model, samples, tmp_path):
    from seer_rl.megatron import megatron_trainer

    metrics, weights = [], []
    for number, make in enumerate((megatron_trainer, megatron_trainer, TorchTrainer)):
        trainer = make(TABLE, other_model, 0)
        metrics.append([trainer.train(samples) for _ in range(3)])
        folder = tmp_path / str(number)
        folder.mkdir()
        trainer.export(folder)
        weights.append(load_file(folder / "model.safetensors"))
    assert metrics[0] == metrics[1]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    for ours, theirs in zip(metrics[0], metrics[2], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


def test_it_is_taken_up_again_as_if_it_had_never_stopped(other_model, samples, tmp_path):
    from seer_rl.megatron import megatron_trainer

    whole = megatron_trainer(TABLE, other_model, 0)
    expected = [whole.train(samples) for _ in range(3)]
    first = megatron_trainer(TABLE, other_model, 0)
    first.train(samples)
    first.export(tmp_path)
    first.save(tmp_path)
    second = megatron_trainer(TABLE, other_model, 0)
    second.load(tmp_path)
    assert [second.train(samples) for _ in range(2)] == expected[1:]


def test_a_model_that_it_does_not_know_is_refused(tmp_path):
    from seer_rl.megatron import megatron_trainer
    from transformers import GPT2Config, Qwen3Config

    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="a gpt2, is none"):
        megatron_trainer(TABLE, tmp_path, 0)
    Qwen3Config(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}).save_pretrained(
        tmp_path
    )
    with pytest.raises(ConfigError, match="a qwen3, is none"):
        megatron_trainer(TABLE, tmp_path, 0)
