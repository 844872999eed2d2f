"""Routing replay: a mixture takes the experts it is given, weighs them itself, and else stays as it is."""

import base64
from functools import partial

import numpy as np
import pytest
import torch
from seer_host.routed_experts import packed
from seer_rl.batches import micro_batches
from seer_rl.errors import TrainError
from seer_rl.routing_replay import replayed_routing
from seer_rl.scoring import ScoredResponse, samples
from seer_rl.trainer import Sample
from seer_testing.families import VOCABULARY, write_family

from backends.tests.families import TOKENIZER
from seer_core.model import ChunkRecord, Completion, PromptGroup, Sampling

MIXTURES = [
    "Qwen3-MoE",
    "Mixtral",
    "OLMoE",
    "Granite-MoE",
    "GLM-4-MoE",
    "DeepSeek-V3",
    "gpt-oss",
    "Qwen3-Next",
    "Qwen3.5-MoE",
    "Nemotron-H",
]
TEXT = torch.arange(24).reshape(2, 12) * 7 % VOCABULARY


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(request, tmp_path_factory):
    import transformers

    folder = write_family(tmp_path_factory.mktemp("mixture") / "model", request.param, 1, TOKENIZER)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def chosen_by(model):
    """Return the model's own choice for ``TEXT``, [tokens, layers, experts], and its logits."""
    chosen, layers = {}, model.config.num_hidden_layers

    def note(layer, _module, _given, answer):
        chosen[layer] = next(each for each in answer if each.dtype == torch.int64)

    hooks = [
        module.register_forward_hook(partial(note, int(name.split(".layers.")[1].split(".")[0])))
        for name, module in model.named_modules()
        if type(module).__name__.lower().endswith("topkrouter")
    ]
    logits = model(TEXT, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    some = next(iter(chosen.values()))
    return torch.stack([chosen.get(layer, torch.zeros_like(some)) for layer in range(layers)], dim=1), logits


def test_its_own_choice_changes_no_bit_and_another_is_taken_with_the_trainer_s_own_weights(mixture):
    own, logits = chosen_by(mixture)
    with replayed_routing(mixture, own):
        replayed = mixture(TEXT, use_cache=False).logits
    assert torch.equal(replayed, logits)
    experts = next(each.num_experts for each in mixture.modules() if hasattr(each, "num_experts"))
    other = (own + 1) % experts
    with replayed_routing(mixture, other):
        taken, moved = chosen_by(mixture)
        mixture(TEXT, use_cache=False).logits.sum().backward()
    routed = [
        layer
        for layer in range(own.shape[1])
        if not torch.equal(taken[:, layer], torch.zeros_like(own[:, 0]))
    ]
    assert torch.equal(taken[:, routed], other[:, routed])
    assert not torch.allclose(moved, logits)
    routers = [each for each in mixture.modules() if type(each).__name__.lower().endswith("topkrouter")]
    assert all(each.weight.grad is not None for each in routers)
    with replayed_routing(mixture, torch.where(torch.arange(24)[:, None, None] < 12, own, -1)):
        assert torch.equal(mixture(TEXT, use_cache=False).logits, logits)  # -1: its own choice
    assert torch.equal(mixture(TEXT, use_cache=False).logits, logits)


def test_experts_that_do_not_fit_the_model_are_refused():
    dense = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(2, 2)])})
    with (
        pytest.raises(TrainError, match="0 layers with a router"),
        replayed_routing(dense, torch.zeros(1, 1, 1)),
    ):
        pass


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_experts_stand_beside_their_tokens_and_the_last_of_each_sample_has_none(layout):
    def sample(size, first):
        experts = np.full((size - 1, 2, 3), first, np.uint16) + np.arange(size - 1)[:, None, None]
        return Sample(
            [5], [6] * (size - 1), [-1.0] * (size - 1), 1.0, routed_experts=experts.astype(np.uint16)
        )

    [batch] = micro_batches([sample(3, 10), sample(5, 20)], 20, packed=layout == "packed")
    found = batch.experts[..., 1, 2].tolist()
    longer, shorter = [20, 21, 22, 23, -1], [10, 11, -1]
    assert found == ([[*longer, *shorter]] if layout == "packed" else [longer, [*shorter, -1, -1]])


def scored(*attachments):
    chunks = [ChunkRecord("i", 2, 0, 1, 0, 0, 0, 0, 0, attachments=each) for each in attachments]
    tokens, group = [7] * 2 * len(chunks), PromptGroup("g", [5, 6], 1, Sampling(), 8, 1)
    completion = Completion(
        "g/0", "g", 0, 1, tokens, [-1.0] * len(tokens), None, "stop", 0, chunks, ["i"], 1.0, {}
    )
    return [ScoredResponse(group, completion, 1.0)]


def test_a_response_s_experts_are_joined_for_its_sample_and_one_without_them_ends_training():
    experts = np.arange(15).reshape(5, 1, 3)
    whole = scored(
        *({"routed_experts": packed(part, start)} for part, start in ((experts[:3], 0), (experts[3:], 3)))
    )
    [sample] = samples(whole, scale=False, replay_routing=True)
    assert (sample.routed_experts == experts).all()
    assert samples(whole, scale=False)[0].routed_experts is None
    served = base64.b64encode(experts.astype("<i4").tobytes()).decode()
    of_a_server = scored({"routed_experts": served[: len(served) // 5 * 3]}, {"routed_experts": served})
    [sample] = samples(of_a_server, scale=False, replay_routing=True, experts_per_token=3)
    assert (sample.routed_experts == experts).all()
    with pytest.raises(TrainError, match="answers 3 routed experts for each token"):
        samples(of_a_server, scale=False, replay_routing=True)
    with pytest.raises(TrainError, match="enable_return_routed_experts = true"):
        samples(scored({}), scale=False, replay_routing=True)
    with pytest.raises(TrainError, match="of 3 positions in place of 5"):
        samples(scored({"routed_experts": packed(experts[:3], 0)}, {}), scale=False, replay_routing=True)
