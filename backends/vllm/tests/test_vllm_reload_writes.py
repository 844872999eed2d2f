"""A reload that leaves a parameter as it was, or writes only part of it, is refused by its name."""

from types import SimpleNamespace

import pytest

from seer_core.errors import EngineError

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]  # imports vLLM: ten seconds


class Tensors:
    """A source of tensors."""

    def __init__(self, tensors):
        self._tensors = tensors

    def tensors(self):
        yield from self._tensors.items()


@pytest.fixture(scope="module")
def torch():
    pytest.importorskip("vllm")
    return pytest.importorskip("torch")


@pytest.fixture
def reload(torch):
    """Return a function that lets vLLM reload a small model, whose ``load`` is given name and tensor.

    ``first`` has parameters ``a`` and ``b``, ``second`` has ``c``, and the buffers ``kept`` and ``passing``.
    """
    from seer_vllm.reload_writes import ReloadWrites
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    def reload(load, tie=False):
        model = torch.nn.Module()
        model.first, model.second = torch.nn.Module(), torch.nn.Module()
        for layer, name in ((model.first, "a"), (model.first, "b"), (model.second, "c")):
            layer.register_parameter(name, torch.nn.Parameter(torch.zeros(4, 2), requires_grad=False))
        if tie:
            model.second.c = model.first.a
        model.second.register_buffer("kept", torch.ones(2))
        model.second.register_buffer("passing", torch.ones(2), persistent=False)
        record_metadata_for_reloading(model)
        held = dict(model.named_parameters())
        written = ReloadWrites(model)
        with written.watching():
            initialize_layerwise_reload(model)
            places = dict(model.named_parameters()) | dict(model.named_buffers())
            source = Tensors({name: torch.full_like(each, 7, device="cpu") for name, each in places.items()})
            for name, tensor in written.of(source):
                load(name, places[name], tensor)
            finalize_layerwise_reload(model, None)
        written.expect_all()
        assert {name: id(each) for name, each in model.named_parameters()} == {
            name: id(each) for name, each in held.items()
        }
        return {name: each.unique().tolist() for name, each in held.items()}

    return reload


def by_loader(place, tensor):
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    getattr(place, "weight_loader", default_weight_loader)(place, tensor)


ALL = {"first.a": [7.0], "first.b": [7.0], "second.c": [7.0]}


def test_what_a_loader_writes_is_there_and_what_is_copied_without_one_too(reload):
    assert reload(lambda name, place, tensor: by_loader(place, tensor)) == ALL
    assert reload(lambda name, place, tensor: place.data.copy_(tensor)) == ALL

    def in_parts(name, place, tensor):
        place.data[:3].copy_(tensor[:3])
        place[3:] = tensor[3:]

    assert reload(in_parts) == ALL
    ways = {"first.b": by_loader}
    assert reload(lambda name, place, tensor: ways.get(name, row_by_row)(place, tensor)) == ALL


def row_by_row(place, tensor):
    for row, values in enumerate(tensor):
        place.data[row].copy_(values)


@pytest.mark.parametrize(
    ("lost", "fact"),
    [
        ("first.a", "vLLM loaded no new weights into 'first.a'"),
        ("first.b", "vLLM loaded no new weights into 'first.b'"),
        ("second.c", "vLLM loaded no new weights into 'second.c'"),
        ("second.kept", "vLLM loaded no new weights into 'second.kept'"),
    ],
)
def test_a_parameter_that_is_not_written_is_named_and_so_is_a_buffer_whose_layer_is(reload, lost, fact):
    with pytest.raises(EngineError, match=fact):
        reload(lambda name, place, tensor: name == lost or by_loader(place, tensor))


def test_a_layer_that_loads_nothing_is_named_though_vllm_only_logs_it(reload):
    with pytest.raises(EngineError, match=r"no new weights into 'second.c'; its old ones would answer"):
        reload(lambda name, place, tensor: name.startswith("first") and by_loader(place, tensor))


def test_a_parameter_that_is_written_in_part_is_named(reload):
    def load(name, place, tensor):
        if name == "first.b":
            place.data[:3].copy_(tensor[:3])
            place.data[:3].copy_(tensor[:3])
        else:
            by_loader(place, tensor)

    with pytest.raises(EngineError, match=r"vLLM loaded 6 of 8 values into 'first.b'"):
        reload(load)


def test_a_parameter_that_is_one_with_another_is_written_with_it(reload):
    def load(name, place, tensor):
        if name.startswith("first"):
            by_loader(place, tensor)

    found = reload(load, tie=True)
    assert found == {"first.a": [7.0], "first.b": [7.0]}


@pytest.fixture(params=["float32", "bfloat16"])
def layer(request, torch):
    """Experts as vLLM has them before their first packing, and what packs them."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    packs = object.__new__(CPUUnquantizedExperts)
    packs.moe_config = SimpleNamespace(intermediate_size_per_partition=80, activation=MoEActivation.SILU)
    layer = torch.nn.Module()
    layer.moe_config = packs.moe_config
    layer.quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=packs))
    for name, rows, columns in (("w13_weight", 160, 64), ("w2_weight", 64, 80)):
        values = torch.randn(3, rows, columns, dtype=getattr(torch, request.param))
        layer.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))
    record_metadata_for_reloading(layer)
    return layer


@pytest.mark.parametrize("version", [0, 1, 12345])
def test_packed_experts_show_the_values_that_were_loaded_and_experts_left_unpacked_do_not(
    layer, torch, version
):
    from seer_vllm import packing

    places = packing.places(layer, version)[layer]
    assert all(len(each) == 256 for each in places.unpacked.values())
    given = places.given(layer)
    unpacked = {name: value.clone() for name, value in layer.named_parameters()}
    packing.packer(layer).process_weights_after_loading(layer)
    assert layer.w13_weight.numel() > unpacked["w13_weight"].numel()  # it is padded
    found = places.found(layer)
    assert all(torch.equal(found[name], given[name]) for name in given)
    layer.w2_weight.data = layer.w2_weight.data.roll(1, -1)
    assert not torch.equal(places.found(layer)["w2_weight"], given["w2_weight"])
