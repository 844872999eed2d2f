"""An adapter in training: what is trained and written, and that it can be put down and taken up again."""

import json
import random

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from seer_host.config_files import make_config
from seer_rl.config import LoraTable, OptimizerTable, TorchTable, TrainTable
from seer_rl.torch_trainer import TorchTrainer
from seer_rl.trainer import Sample
from seer_rl.training_run import _make_trainer
from transformers import AutoModelForCausalLM

from seer_core.errors import ConfigError

peft = pytest.importorskip("peft")

TABLE = TrainTable(
    "",
    "",
    optimizer=OptimizerTable(learning_rate=1e-2),
    torch=TorchTable(micro_tokens=64),
    lora=LoraTable(rank=4, alpha=8.0),
)
FILES = {"adapter_config.json", "adapter_model.safetensors"}


def samples_of(logprobs):
    draw = random.Random(3)
    found = []
    for number in range(4):
        prompt = [draw.randrange(3, 512) for _ in range(3)]
        response = [draw.randrange(3, 512) for _ in range(5 + number)]
        found.append(Sample(prompt, response, logprobs(prompt, response), (-1.0) ** number))
    return found


def logprobs_of(model):
    """Return a function: the log-probs of a response by a model of transformers."""

    def logprobs(prompt, response):
        with torch.no_grad():
            logits = model.eval()(torch.tensor([[*prompt, *response]])).logits[0].double()
        return (
            logits.log_softmax(-1)[len(prompt) - 1 : -1]
            .gather(1, torch.tensor(response)[:, None])[:, 0]
            .tolist()
        )

    return logprobs


@pytest.fixture(scope="module")
def samples(model):
    return samples_of(logprobs_of(AutoModelForCausalLM.from_pretrained(model)))


def test_the_factors_alone_are_trained_and_peft_reads_what_is_written(model, samples, tmp_path):
    trainer = TorchTrainer(TABLE, model, 0)
    assert trainer.train(samples)["dlogp_max"] < 1e-5  # at first an adapter changes nothing
    trainer.export(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES
    assert json.loads((tmp_path / "adapter_config.json").read_text()) == trainer.adapter_config()
    written = load_file(tmp_path / "adapter_model.safetensors")
    assert all(torch.equal(each, written[name]) for name, each in trainer.tensors())
    base = AutoModelForCausalLM.from_pretrained(model)
    read = peft.PeftModel.from_pretrained(base, tmp_path).merge_and_unload()
    assert trainer.train(samples_of(logprobs_of(read)))["dlogp_max"] < 1e-5
    assert trainer.train(samples)["dlogp_max"] > 1e-3


def test_training_goes_on_from_a_checkpoint_bit_for_bit(model, samples, tmp_path):
    whole = TorchTrainer(TABLE, model, 0)
    for _ in range(2):
        whole.train(samples)
    first = TorchTrainer(TABLE, model, 0)
    first.train(samples)
    first.export(tmp_path)
    first.save(tmp_path)
    second = TorchTrainer(TABLE, model, 0)
    second.load(tmp_path)
    second.train(samples)
    assert all(
        torch.equal(one, other)
        for (_, one), (_, other) in zip(whole.tensors(), second.tensors(), strict=True)
    )


def test_another_adapter_than_the_table_describes_is_refused(model, tmp_path):
    trainer = TorchTrainer(msgspec.structs.replace(TABLE, lora=LoraTable(rank=2)), model, 0)
    with pytest.raises(ConfigError, match="holds no adapter"):
        trainer.load(tmp_path)
    TorchTrainer(TABLE, model, 0).export(tmp_path)
    with pytest.raises(ConfigError, match=r"holds another adapter than \[train.lora\] describes: see '"):
        trainer.load(tmp_path)
    save_file({"x": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="holds another adapter"):
        trainer.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"lora": LoraTable(rank=4, targets=["no_proj"])}, r"\[train.lora\].targets: .*no_proj"),
        ({"trainer": "megatron"}, 'the trainer "megatron" trains all weights'),
    ],
)
def test_an_adapter_that_cannot_be_trained_is_refused(model, change, fact):
    table = msgspec.structs.replace(TABLE, model=str(model), **change)
    with pytest.raises(ConfigError, match=fact):
        _make_trainer(table, make_config({}, [], base_dir=model, origin="test"))
