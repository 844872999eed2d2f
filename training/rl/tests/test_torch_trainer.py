"""The plain trainer: what it computes, and that it can be put down and taken up again."""

import math
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from seer_rl.config import LossTable, OptimizerTable, TorchTable, TrainTable
from seer_rl.errors import TrainError
from seer_rl.torch_trainer import TorchTrainer
from seer_rl.trainer import Sample
from transformers import AutoModelForCausalLM

from seer_core.errors import ConfigError

TABLE = TrainTable("", "", optimizer=OptimizerTable(learning_rate=1e-2), torch=TorchTable(micro_tokens=64))


def change(table=TABLE, **parts):
    import msgspec

    return msgspec.structs.replace(table, **parts)


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def direct_logprobs(folder, sample):
    """Return a sample's log-probs as one process without micro-batches computes them."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([[*sample.prompt, *sample.response]])
    with torch.no_grad():
        every = torch.log_softmax(model(ids).logits[0].double(), -1)
    place = len(sample.prompt) - 1
    return [every[place + i, token].item() for i, token in enumerate(sample.response)]


@pytest.fixture(scope="module")
def samples(model):
    """Samples of several lengths, with log-probs as an engine with these weights has them."""
    rng = random.Random(3)
    found = []
    for number in range(6):
        prompt = [rng.randrange(3, 512) for _ in range(rng.randrange(1, 6))]
        response = [rng.randrange(3, 512) for _ in range(rng.randrange(4, 30))]
        bare = Sample(prompt, response, [], 0.0)
        found.append(
            Sample(prompt, response, direct_logprobs(model, bare), (-1.0) ** number * (1 + number / 7))
        )
    return found


def learn(model, folder, samples, table=TABLE, times=1):
    trainer = TorchTrainer(table, model, 0)
    metrics = [trainer.train(samples) for _ in range(times)]
    trainer.export(folder)
    return metrics, weights(folder)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def by_hand(model, samples, optimizer):
    """Make two updates over whole sequences, one at a time, with torch's own optimizer."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    steps = torch.optim.AdamW(
        reference.parameters(),
        lr=optimizer.learning_rate,
        betas=(optimizer.beta1, optimizer.beta2),
        weight_decay=optimizer.weight_decay,
    )
    tokens, norms = sum(each.trained_tokens for each in samples), []
    for _ in range(2):
        loss = torch.zeros(())
        for each in samples:
            logits = reference(torch.tensor([[*each.prompt, *each.response]])).logits[0]
            logprobs = torch.log_softmax(logits, -1)[len(each.prompt) - 1 : -1]
            chosen = logprobs.gather(-1, torch.tensor(each.response)[:, None])
            if each.loss_mask is not None:
                chosen = chosen * torch.tensor(list(each.loss_mask))[:, None]
            loss = loss - each.advantage * chosen.sum() / tokens
        steps.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(reference.parameters(), optimizer.max_grad_norm).item())
        steps.step()
    return norms, reference.state_dict()


@pytest.mark.parametrize(
    "settings", [{}, {"beta1": 0.5}, {"beta2": 0.5}, {"weight_decay": 5.0}, {"max_grad_norm": 1e-7}]
)
def test_the_loss_is_the_mean_over_tokens_and_a_step_that_of_adamw(model, samples, tmp_path, settings):
    optimizer = OptimizerTable(learning_rate=1e-2, **settings)
    metrics, after = learn(model, tmp_path, samples, change(optimizer=optimizer), times=2)
    tokens = sum(len(each.response) for each in samples)
    expected = -sum(each.advantage * len(each.response) for each in samples) / tokens
    assert metrics[0]["loss"] == pytest.approx(expected, rel=1e-6)
    assert metrics[0]["trained_tokens"] == tokens
    norms, reference = by_hand(model, samples, optimizer)
    assert [each["grad_norm"] for each in metrics] == pytest.approx(norms, rel=1e-3)
    before, (_, default) = weights(model), by_hand(model, samples, OptimizerTable(learning_rate=1e-2))
    for name, tensor in reference.items():
        moved = (tensor - before[name]).abs().max()
        assert (tensor - after[name]).abs().median() < 2e-3 * moved + 1e-12
        if settings:
            assert (default[name] - after[name]).abs().max() > 2e-2 * moved


def masked(samples):
    """Return samples in which every third token is an environment's, whose engine log-prob is 0."""
    found = []
    for each in samples:
        mask = bytes(place % 3 != 1 for place in range(len(each.response)))
        logprobs = [logprob * bit for logprob, bit in zip(each.logprobs, mask, strict=True)]
        found.append(Sample(each.prompt, each.response, logprobs, each.advantage, mask))
    return found


def test_an_environment_s_tokens_are_context_alone(model, samples, tmp_path):
    turns = masked(samples)
    metrics, after = learn(model, tmp_path, turns, times=2)
    tokens = sum(sum(each.loss_mask) for each in turns)
    assert metrics[0]["trained_tokens"] == tokens < sum(len(each.response) for each in turns)
    expected = -sum(each.advantage * sum(each.loss_mask) for each in turns) / tokens
    assert metrics[0]["loss"] == pytest.approx(expected, rel=1e-6)
    assert metrics[0]["dlogp_max"] < 1e-5
    norms, reference = by_hand(model, turns, TABLE.optimizer)
    assert [each["grad_norm"] for each in metrics] == pytest.approx(norms, rel=1e-3)
    before = weights(model)
    for name, tensor in reference.items():
        assert (tensor - after[name]).abs().median() < 2e-3 * (tensor - before[name]).abs().max() + 1e-12


def test_an_environment_s_tokens_enter_neither_ratio_nor_penalty(model, samples, tmp_path):
    table = change(loss=LossTable(epochs=3, kl=0.5))
    turns = masked(samples)
    trainer = TorchTrainer(table, model, 0)
    seen = []

    def record(batch, compute=trainer._model.logprobs):
        seen.append(compute(batch))
        return seen[-1]

    trainer._model.logprobs = record
    metrics = trainer.train(turns)
    tokens = sum(each.trained_tokens for each in turns)
    assert sum(len(each) for each in seen) == 3 * tokens
    assert metrics["clipped"] > 0
    assert metrics["kl"] > 0


def test_engine_and_trainer_agree_on_log_probs_and_a_difference_is_measured(model, samples, tmp_path):
    [metrics], _ = learn(model, tmp_path, samples)
    assert 0 < metrics["dlogp_mean"] < 1e-6
    assert metrics["dlogp_mean"] <= metrics["dlogp_p9999"] <= metrics["dlogp_max"] < 1e-5
    stale = [Sample(each.prompt, each.response, [x - 0.5 for x in each.logprobs], 1.0) for each in samples]
    assert TorchTrainer(TABLE, model, 0).train(stale)["dlogp_mean"] == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("layout", [TorchTable(micro_tokens=4096), TorchTable(micro_tokens=64, packed=True)])
def test_layouts_of_micro_batches_differ_by_rounding_alone(model, samples, tmp_path, layout):
    [one], _ = learn(model, tmp_path / "one", samples)
    [other], _ = learn(model, tmp_path / "other", samples, change(torch=layout))
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)


def test_the_same_samples_give_the_same_weights_to_the_last_bit(model, samples, tmp_path):
    first = learn(model, tmp_path / "one", samples, times=2)
    second = learn(model, tmp_path / "two", samples, times=2)
    assert first[0] == second[0]
    assert same(first[1], second[1])
    assert not same(first[1], weights(model))


def test_learning_makes_better_responses_likelier_and_worse_ones_less_likely(model, samples, tmp_path):
    learn(model, tmp_path, samples, times=3)
    for each in samples:
        change = sum(direct_logprobs(tmp_path, each)) - sum(each.logprobs)
        assert change * each.advantage > 0


def test_responses_without_an_advantage_change_nothing_but_the_mean(model, samples, tmp_path):
    idle = Sample([5], [6, 7, 8], [0.0] * 3, 0.0)
    [metrics], after = learn(model, tmp_path / "some", [*samples, idle])
    assert metrics["trained_tokens"] == sum(len(each.response) for each in samples)
    [metrics], after = learn(model, tmp_path / "none", [idle])
    assert (metrics["loss"], metrics["grad_norm"], metrics["trained_tokens"]) == (0.0, 0.0, 0)
    assert same(after, weights(model))


def test_a_penalty_holds_the_policy_near_the_first_weights(model, samples, tmp_path):
    free = change(loss=LossTable(epochs=8))
    held = change(loss=LossTable(epochs=8, kl=5.0))
    [loose], _ = learn(model, tmp_path / "free", samples, free)
    learn(model, tmp_path / "held", samples, held)
    assert loose["clipped"] > 0
    moved = {
        name: sum(abs(sum(direct_logprobs(tmp_path / name, each)) - sum(each.logprobs)) for each in samples)
        for name in ("free", "held")
    }
    assert moved["held"] < moved["free"]


def test_a_trainer_taken_up_again_goes_on_as_if_it_had_never_stopped(model, samples, tmp_path):
    whole = TorchTrainer(TABLE, model, 0)
    expected = [whole.train(samples) for _ in range(3)]
    whole.export(tmp_path)
    expected_weights = weights(tmp_path)
    first = TorchTrainer(TABLE, model, 0)
    assert first.train(samples) == expected[0]
    folder = tmp_path / "checkpoint"
    first.export(folder)
    first.save(folder)
    second = TorchTrainer(TABLE, model, 0)
    second.load(folder)
    assert [second.train(samples) for _ in range(2)] == expected[1:]
    second.export(tmp_path)
    assert same(weights(tmp_path), expected_weights)
    assert (folder / "tokenizer.json").exists()


def test_a_loss_that_is_not_a_number_is_an_error_and_leaves_the_weights(model, samples, tmp_path):
    trainer = TorchTrainer(TABLE, model, 0)
    broken = Sample(samples[0].prompt, samples[0].response, samples[0].logprobs, math.nan)
    with pytest.raises(TrainError, match="the loss is nan"):
        trainer.train([broken, *samples[1:]])
    trainer.export(tmp_path)
    assert same(weights(tmp_path), weights(model))


def test_the_index_of_a_first_model_in_shards_does_not_stand_beside_the_whole_one(model, tmp_path):
    shards, exported = tmp_path / "shards", tmp_path / "exported"
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(shards, max_shard_size="200KB")
    (shards / "tokenizer.json").write_text("{}")
    assert (shards / "model.safetensors.index.json").exists()
    TorchTrainer(TABLE, shards, 0).export(exported)
    names = {path.name for path in exported.iterdir()}
    assert {"model.safetensors", "tokenizer.json"} <= names
    assert "model.safetensors.index.json" not in names
    assert same(weights(exported), weights(model))


def test_a_model_that_lacks_tensors_is_refused(model, tmp_path):
    shutil.copytree(model, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.norm.weight"]
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 of the tensors .*, 'model.norm.weight' first"):
        TorchTrainer(TABLE, tmp_path / "cut", 0)


def test_tensors_that_can_be_shared_are_those_that_are_exported(model, tmp_path):
    trainer = TorchTrainer(TABLE, model, 0)
    trainer.export(tmp_path)
    assert same(dict(trainer.tensors()), load_file(tmp_path / "model.safetensors"))
