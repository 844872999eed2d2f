"""An update makes SGLang of any family one that was started on the weights, and so does the way back."""

import json

import pytest

pytest.register_assert_rewrite("backends.tests.families", "backends.tests.matrix")

from seer_testing.families import FAMILIES  # noqa: E402

from backends.tests.families import expect_updates_to_equal_starts  # noqa: E402
from backends.tests.matrix import expect_the_matrix_to_say_so, rows_of  # noqa: E402

pytestmark = pytest.mark.engine

AT_ONCE = ("Gemma-3", "Qwen3-MoE")
"""A tied head, and experts; test_sglang_engine.py has a plain Qwen3.  The matrix updates models that see."""
ELSEWHERE = {
    "Gemma-2": "this SGLang reads a key that transformers' configuration lacks (hidden_act)",
    "Gemma-4": "refused by name: heads of different widths",
    "Qwen3, eight bits": "its kernel for quantised layers needs a GPU",
    "gpt-oss": "refused by name without a GPU: attention sinks",
    "DeepSeek-V3": "the same: latent attention",
    **dict.fromkeys(("Qwen3-Next", "Qwen3.5", "Qwen3.5-MoE"), "the same: gated delta nets"),
    **dict.fromkeys(("Nemotron-H", "Falcon-H1"), "the same: Mamba-2"),
}
"""Families that do not start here, and why."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=[] if each in AT_ONCE else [pytest.mark.long])
        for each in FAMILIES
        if each not in ELSEWHERE
    ],
)
def test_an_update_and_the_way_back_answer_as_engines_that_start_on_the_weights(
    start, tmp_path, prompts, name
):
    expect_updates_to_equal_starts(start, tmp_path, prompts(6), name)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for _, name in rows_of("sglang")])
def test_a_family_rolls_out_as_the_matrix_says(tmp_path, name):
    expect_the_matrix_to_say_so("sglang", "first", name, tmp_path)


LOSES = """
import json, sys
from seer_sglang import internals
internals.check_kernels()
from types import SimpleNamespace
import torch
from seer_core.errors import EngineError
from seer_sglang import weights

class Method:
    def process_weights_after_loading(self, layer):
        layer.packed = layer.weight.clone()

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2, bias=False)
        self.second.quant_method = Method()

    def load_weights(self, named):
        parameters = dict(self.named_parameters())
        for name, tensor in named:
            if name != self.lost:
                parameters[name].data.copy_(tensor)

def reload(quantization, lost):
    model = Model().requires_grad_(False)
    model.lost = lost
    tensors = {name: torch.full_like(each, 7) for name, each in model.named_parameters()}
    config = SimpleNamespace(quantization=quantization, dtype=torch.float32)
    runner = SimpleNamespace(model=model, device="cpu", model_config=config)
    try:
        weights.load(runner, SimpleNamespace(tensors=lambda: iter(tensors.items())), 1)
    except EngineError as error:
        return str(error)
    return [bool((each == 7).all()) for each in (*model.parameters(), model.second.packed)]

print(json.dumps([reload(*case) for case in json.loads(sys.argv[1])]))
"""


def test_what_loads_nothing_is_named_in_a_plain_model_and_in_a_quantised_one(make_fleet, models, run_in_fork):
    expected = {
        (None, ""): [True] * 4,
        (None, "first.bias"): "SGLang loaded no new weights into 'first.bias'",
        (None, "second.weight"): "SGLang loaded no new weights into 'second.weight'",
        ("w8a8_int8", ""): [True] * 4,
        ("w8a8_int8", "first.weight"): "SGLang loaded no new weights into 'first.weight'",
        ("w8a8_int8", "second.weight"): "SGLang loaded no new weights into layer 'second'",
    }
    [*_, last] = run_in_fork(make_fleet(models[0]).engines[0], LOSES, json.dumps([*expected]))
    assert json.loads(last) == [*expected.values()]


QUANTISES = """
import json

import torch
from seer_sglang import weights
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod

class Rounded(LinearMethodBase):
    def create_weights(self, *arguments, **others):
        pass
    def apply(self, *arguments, **others):
        pass

def model(*kinds):
    layers = torch.nn.Sequential(*(torch.nn.Identity() for _ in kinds))
    for layer, kind in zip(layers, kinds):
        layer.quant_method = kind.__new__(kind)
        if isinstance(layer.quant_method, torch.nn.Module):
            torch.nn.Module.__init__(layer.quant_method)
    return layers

plain = UnquantizedLinearMethod, UnquantizedFusedMoEMethod, BaseKVCacheMethod
print(json.dumps([weights.quantises(model(*kinds)) for kinds in ((), plain, (*plain, Rounded))]))
"""


def test_a_model_is_called_quantised_if_one_of_its_layers_is(make_fleet, models, run_in_fork):
    [*_, last] = run_in_fork(make_fleet(models[0]).engines[0], QUANTISES)
    assert json.loads(last) == [False, False, True]
