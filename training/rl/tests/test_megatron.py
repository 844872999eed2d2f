"""Megatron-core in ranks of its own: the same weights and learning as one process of transformers."""

import math
import os
import random
import resource
import signal
import subprocess
import sys
from contextlib import ExitStack

import pytest
import torch
from safetensors.torch import load_file
from seer_rl.config import LossTable, MegatronTable, OptimizerTable, TorchTable, TrainTable
from seer_rl.errors import TrainError
from seer_rl.megatron import MegatronTrainer
from seer_rl.torch_trainer import TorchTrainer
from seer_rl.trainer import Sample
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3Config

from seer_core.errors import ConfigError
from tests.support.eventually import eventually
from tests.support.processes import alive

pytest.importorskip("megatron", reason="Megatron-core is not installed: `make setup` installs it")

PADDED, PACKED = TorchTable(micro_tokens=64), TorchTable(micro_tokens=64, packed=True)
PLAIN, LONG = LossTable(), LossTable(epochs=2, kl=0.1)
ALONE = MegatronTable()


def table(megatron=ALONE, torch=PADDED, loss=PLAIN):
    optimizer = OptimizerTable(learning_rate=1e-3, beta1=0.8, beta2=0.9, max_grad_norm=0.5)
    return TrainTable("", "", optimizer=optimizer, torch=torch, loss=loss, megatron=megatron)


TABLES = {
    "one process": table(),
    "tensor parallel": table(MegatronTable(tensor_parallel=2), PACKED),
    "pipeline parallel": table(MegatronTable(pipeline_parallel=2), PADDED, LONG),
    "data parallel": table(MegatronTable(data_parallel=2), PACKED, LONG),
}


@pytest.fixture(scope="module")
def samples():
    rng = random.Random(3)
    found = []
    for number in range(6):
        prompt, response = ([rng.randrange(3, 512) for _ in range(count)] for count in (4, 5 + 4 * number))
        mask = bytes(place % 3 != 1 for place in range(len(response))) if number % 2 else None
        advantage = (-1.0) ** number * (1 + number / 7)
        found.append(Sample(prompt, response, [-6.0] * len(response), advantage, mask))
    return found


@pytest.fixture(scope="module")
def begin(other_model, tmp_path_factory):
    """Return a function that returns a layout's trainer with the first weights, always the same processes."""
    trainers = {}
    with ExitStack() as stack:

        def beginning(layout):
            if layout not in trainers:
                trainer = stack.enter_context(MegatronTrainer(TABLES[layout], other_model, 0))
                first = tmp_path_factory.mktemp("first")
                trainer.export(first)
                trainer.save(first)
                trainers[layout] = trainer, first
            trainer, first = trainers[layout]
            trainer.load(first)
            return trainer

        yield beginning


def weights(folder):
    """Read a model by transformers."""
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def learn(trainer, samples, folder, times=3):
    metrics = [trainer.train(samples) for _ in range(times)]
    folder.mkdir()
    trainer.export(folder)
    return metrics, weights(folder)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


every_layout = pytest.mark.parametrize("layout", TABLES)


@every_layout
def test_weights_go_through_and_back_bit_for_bit(begin, other_model, layout, tmp_path):
    trainer = begin(layout)
    trainer.export(tmp_path)
    assert same(weights(other_model), weights(tmp_path))
    assert same(load_file(other_model / "model.safetensors"), dict(trainer.tensors()))
    assert (tmp_path / "tokenizer.json").exists()


@every_layout
def test_it_trains_the_weights_that_the_trainer_torch_trains(begin, other_model, samples, layout, tmp_path):
    ours, after = learn(begin(layout), samples, tmp_path / "megatron")
    theirs, expected = learn(TorchTrainer(TABLES[layout], other_model, 0), samples, tmp_path / "torch")
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        # Sums in another order: float32 has 7 digits, of which a few go where updates add up.
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
    # AdamW divides a gradient by its size, so that the error of a small one counts as much as that of a
    # large one.  A step moves a weight by the learning rate, 1e-3, at most; this is a hundredth of that.
    for name in expected:
        torch.testing.assert_close(after[name], expected[name], atol=1e-5, rtol=0)
    assert not same(after, weights(other_model))


@every_layout
def test_a_layout_is_bit_equal_run_to_run_and_where_it_is_taken_up_again(begin, samples, layout, tmp_path):
    expected, after = learn(begin(layout), samples, tmp_path / "whole")
    trainer, checkpoint = begin(layout), tmp_path / "checkpoint"
    metrics, _ = learn(trainer, samples, checkpoint, times=1)
    trainer.save(checkpoint)
    assert metrics == expected[:1]
    ranks = TABLES[layout].megatron.ranks
    assert len(list(checkpoint.glob("optimizer-*.pt"))) == ranks
    trainer = begin(layout)
    trainer.load(checkpoint)
    metrics, again = learn(trainer, samples, tmp_path / "again", times=2)
    assert metrics == expected[1:]
    assert same(after, again)


def test_a_new_trainer_takes_up_a_checkpoint_bit_for_bit(begin, samples, other_model, tmp_path):
    trainer = begin("data parallel")
    trainer.train(samples)
    trainer.export(tmp_path)
    trainer.save(tmp_path)
    expected = trainer.train(samples)
    with MegatronTrainer(TABLES["data parallel"], other_model, 0) as other:
        other.load(tmp_path)
        assert other.train(samples) == expected


def test_fewer_micro_batches_than_replicas_are_enough(begin, other_model, samples):
    one = begin("data parallel").train(samples[:1])
    expected = TorchTrainer(TABLES["data parallel"], other_model, 0).train(samples[:1])
    assert one == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_without_an_advantage_the_weights_stay(begin, other_model, samples, tmp_path):
    idle = [Sample([5], [6, 7, 8], [0.0] * 3, 0.0)]
    [metrics], after = learn(begin("tensor parallel"), idle, tmp_path / "out", times=1)
    assert metrics == TorchTrainer(TABLES["tensor parallel"], other_model, 0).train(idle)
    assert same(after, weights(other_model))


@pytest.mark.parametrize("layout", ["pipeline parallel", "data parallel"])
def test_a_loss_that_is_not_a_number_is_an_error_and_leaves_the_weights(
    begin, other_model, samples, layout, tmp_path
):
    trainer = begin(layout)
    broken = Sample(samples[0].prompt, samples[0].response, samples[0].logprobs, math.nan)
    with pytest.raises(TrainError, match="the loss is nan"):
        trainer.train([broken, *samples[1:]])
    trainer.export(tmp_path)
    assert same(weights(tmp_path), weights(other_model))
    assert math.isfinite(trainer.train(samples)["loss"])


def test_a_full_disk_is_an_error_of_the_system_and_the_ranks_go_on(begin, samples, tmp_path):
    trainer = begin("pipeline parallel")
    _, rank = trainer._ranks.pids
    unlimited = resource.prlimit(rank, resource.RLIMIT_FSIZE)
    resource.prlimit(rank, resource.RLIMIT_FSIZE, (4096, unlimited[1]))
    for write in (trainer.export, trainer.save):
        with pytest.raises(OSError, match=r"."):
            write(tmp_path)
    resource.prlimit(rank, resource.RLIMIT_FSIZE, unlimited)
    trainer.export(tmp_path)
    trainer.save(tmp_path)
    trainer.load(tmp_path)


def test_a_rank_that_dies_is_named_and_ends_the_others(other_model, samples):
    with MegatronTrainer(TABLES["tensor parallel"], other_model, 0) as trainer:
        pids = trainer._ranks.pids
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(TrainError, match=r"rank 1 of the trainer was killed by SIGKILL; .* --resume"):
            trainer.train(samples)
        assert not any(map(alive, pids))
        with pytest.raises(TrainError, match="ranks have ended"):
            trainer.train(samples)


def test_a_rank_that_hangs_is_named_in_bounded_time(other_model, samples):
    with MegatronTrainer(TABLES["data parallel"], other_model, 0) as trainer:
        pids = trainer._ranks.pids
        trainer._ranks._timeout_s = 10.0  # starting may take longer
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(TrainError, match=r"within 10 s, and the furthest back is rank 1; .* --resume"):
            trainer.train(samples)
        assert not any(map(alive, pids))


def test_ranks_end_with_a_process_that_was_killed(other_model):
    program = f"""
import pathlib, time
from seer_rl.config import MegatronTable, TrainTable
from seer_rl.megatron import MegatronTrainer
table = TrainTable("", "", megatron=MegatronTable(data_parallel=2))
with MegatronTrainer(table, pathlib.Path({str(other_model)!r}), 0) as trainer:
    print(*trainer._ranks.pids, flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(text) for text in parent.stdout.readline().split()]
        assert all(map(alive, pids))
        parent.kill()
    eventually(lambda: not any(map(alive, pids)))
    assert len(pids) == 2


def test_weights_that_are_not_there_are_an_error_before_training(other_model, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((other_model / name).read_bytes())
    with (
        pytest.raises(ConfigError, match="the trainer cannot read the weights in"),
        MegatronTrainer(table(), tmp_path, 0),
    ):
        pass


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tensor_parallel": 8}, "tensor_parallel = 8 cannot share out the model's 4 heads in equal parts"),
        ({"tensor_parallel": 4}, "the model's 2 heads of keys and values"),
        ({"pipeline_parallel": 3}, "pipeline_parallel = 3 cannot share out the model's 2 layers"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(other_model, layout, message):
    with pytest.raises(ConfigError, match=message):
        MegatronTrainer(table(MegatronTable(**layout)), other_model, 0)


def test_a_vocabulary_that_would_have_to_be_padded_is_refused(other_model, tmp_path):
    config = Qwen3Config.from_pretrained(other_model)
    config.vocab_size = 511
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="the model's 511 tokens of the vocabulary"):
        MegatronTrainer(table(MegatronTable(tensor_parallel=2)), tmp_path, 0)


def test_devices_that_are_not_there_are_refused(other_model):
    devices = torch.cuda.device_count()
    gpus = table(MegatronTable(data_parallel=devices + 1), TorchTable(device="cuda"))
    with pytest.raises(ConfigError, match=f"asks for {devices + 1} ranks, each with a GPU of its own"):
        MegatronTrainer(gpus, other_model, 0)
    with pytest.raises(ConfigError, match='device = "tpu"'):
        MegatronTrainer(table(torch=TorchTable(device="tpu")), other_model, 0)


def test_a_model_that_it_does_not_support_is_refused(tmp_path):
    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="a gpt2, is none"):
        MegatronTrainer(table(), tmp_path, 0)
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    others = {"rope_parameters": rope}, {"attention_bias": True}, {"hidden_act": "gelu"}
    for other in others:
        Qwen3Config(**other).save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match="a qwen3, is none"):
            MegatronTrainer(table(), tmp_path, 0)
