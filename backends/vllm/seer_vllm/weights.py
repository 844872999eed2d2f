"""New weights into a running model, and the proof that it answers by them.

What of vLLM 0.32 this works around:

- On a CPU every linear layer and the output head compute with a packed copy of their weights, which
  ``process_weights_after_loading`` makes.  vLLM's reload calls that for the layers into which it has loaded
  something.  A head that is tied to the embeddings is not among them, for its weights are loaded as the
  embeddings': it would go on with the packed copy of the old ones.  So layers that share their weights are
  packed once more after a reload.
- On a CPU experts are packed at the first load only; a reload would write unpacked ones over them.  So they
  are packed at every load.
- What a model copies without a parameter's loader is lost (``written``).

- A kernel for eight bits on a CPU goes on reading scales in memory that a reload frees.  So that is kept.

The proof: every parameter has been written, value for value, or is one with another that was.  Then each
plain layer is asked for single columns of its weights: its product, by any kernel and packing that it uses,
with vectors that are 1 at one place and 0 elsewhere.  Such a product is exact, in every precision and order
of summation, so it must equal, bit for bit, the columns of what was loaded; an old copy gives old ones.

The products of experts and of quantised layers are not exact.  Of a CPU's experts single values are compared
with what was loaded, at the places where packing puts them (``packing``).  Quantised layers are asked too,
and must answer as they did when they had just been packed.  All layers must hold what packing has made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

import structlog
import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

from seer_core.errors import EngineError
from seer_core.ports.weights import WeightSource
from seer_vllm import packing
from seer_vllm.reload_writes import ReloadWrites

if TYPE_CHECKING:
    from torch import Tensor

Module = Any
"""A ``torch.nn.Module`` with what vLLM adds to one, which torch's types lack."""

__all__ = ["fingerprint", "load"]

log = structlog.get_logger("seer")

COLUMNS = 8
PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
SAMPLED = 4096
"""At most about so many values of any other tensor enter a fingerprint."""


def load(worker: Any, source: WeightSource, version: int) -> str:
    """Load what a source reads into the worker's model; return the fingerprint of what it is now.

    Raises:
        EngineError: a parameter was not written, or a layer does not answer by what was loaded; the model is
            of no use any more.
    """
    model = worker.model_runner.get_model()
    layers, experts = _plain_layers(model), packing.places(model, version)
    quantised = set(_quantised_layers(model).values())
    columns = {layer: _places(layer, version) for layer in layers.values()}
    given: dict[Module, dict[str, Tensor]] = {}
    made: dict[Module, dict[str, Tensor]] = {}

    def before(layer: Module) -> None:
        if layer in columns:
            given[layer] = {"weight": layer.weight.detach()[:, columns[layer]].t().clone()}
        elif layer in experts:
            given[layer] = experts[layer].given(layer)

    def after(layer: Module) -> None:
        if layer not in columns:
            made[layer] = {
                part: _sample(tensor, version).clone()
                for part, tensor in _own(layer)
                if part not in SKIP_TENSORS  # which are loaded in place, before or after
            }
        if layer in quantised:
            given[layer] = {"answers": _ask(layer, _places(layer, version))}
            _keep(layer)

    began = perf_counter()
    written = ReloadWrites(model)
    with _packing(model, before, after) as seconds:
        with written.watching():
            worker.reload_weights(weights_iterator=written.of(source))
        for layer in _tied(layers):
            layer.quant_method.process_weights_after_loading(layer)
    loaded = perf_counter()
    written.expect_all()
    answers = {}
    for name, layer in layers.items():
        if layer not in given:
            raise EngineError(f"vLLM loaded no new weights into layer {name!r}; its old ones would answer on")
        answers[name] = _ask(layer, columns[layer])
        if not torch.equal(answers[name], given[layer]["weight"]):
            raise _other_answers(name)
    for name, layer in _quantised_layers(model).items():
        answers[name] = _ask(layer, _places(layer, version))
        if not _equal({"answers": answers[name]}, given.get(layer, {})):
            raise _other_answers(name)
    for name, layer in model.named_modules():
        same = layer not in experts or _equal(experts[layer].found(layer), given[layer])
        made_here = made.get(layer, {})
        kept = {part: _sample(tensor, version) for part, tensor in _own(layer) if part in made_here}
        if not (same and _equal(kept, made_here)):
            raise EngineError(f"layer {name!r} does not hold the weights just loaded, but others")
    found = _digest(model, version, answers, experts)
    packed_s = sum(seconds)
    log.info(
        "weights_loaded",
        version=version,
        loaded_s=round(loaded - began - packed_s, 4),
        packed_s=round(packed_s, 4),
        proved_s=round(perf_counter() - loaded, 4),
    )
    return found


def fingerprint(model: Module, version: int) -> str:
    """Return what stands for the weights by which a model answers, the same for all kernels.

    Quantised layers, and experts elsewhere than on a CPU, are looked at as their kernels hold them.  A name
    of these kernels then stands before a colon, for fingerprints of different ones cannot be compared.
    ``version`` chooses the values of large weights that are looked at, so that they change.
    """
    answers = {name: _ask(layer, _places(layer, version)) for name, layer in _plain_layers(model).items()}
    return _digest(model, version, answers, packing.places(model, version))


def _digest(
    model: Module, version: int, answers: dict[str, Tensor], experts: dict[Module, packing.Places]
) -> str:
    digest, kernels = hashlib.sha256(), hashlib.sha256()
    for name, columns in answers.items():
        _add(digest, name, columns)
    stored = set(model.state_dict())
    packed = False
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        own, places = _own(layer), experts.get(layer)
        if places is not None:
            for part, values in places.found(layer).items():
                _add(digest, f"{name}.{part}", values)
        elif own and type(method) not in (*PLAIN, type(None)):
            packed = True
            kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
            kernels.update(f"{type(method).__name__} {type(kernel).__name__}".encode())
            for part, tensor in own:
                kernels.update(f"{part} {tensor.dtype} {[*tensor.shape]} {tensor.stride()}".encode())
        if not is_deferred_attention_layer(layer):  # which has scales of KV, and may measure them
            buffers = layer.named_buffers(recurse=False)
            own += [(part, each) for part, each in buffers if f"{name}.{part}" in stored]
        for part, tensor in own:
            asked = (places is not None and part in places.packed) or (name in answers and part == "weight")
            if tensor.numel() and not asked:
                # vLLM keeps a convolution's weights beside the copy that is packed for some CPUs.
                plain = getattr(layer, "_cpu_unpacked_conv_weight", tensor) if part == "weight" else tensor
                _add(digest, f"{name}.{part}", _sample(plain, version))
    found = digest.hexdigest()[:32]
    return f"{kernels.hexdigest()[:8]}:{found}" if packed else found


def _own(layer: Module) -> list[tuple[str, Tensor]]:
    """Return the parameters of a layer itself, by name."""
    return [(part, tensor.detach()) for part, tensor in layer.named_parameters(recurse=False)]


def _sample(tensor: Tensor, version: int) -> Tensor:
    """Return about ``SAMPLED`` values of a tensor, or all."""
    step = -(-tensor.numel() // SAMPLED) or 1
    return tensor.flatten()[version % step :: step]


def _equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(_bytes(found[part]), _bytes(expected[part])) for part in found
    )


def _bytes(values: Tensor) -> Tensor:
    """Return the bytes of values, some of whose dtypes torch cannot compare."""
    return values.contiguous().view(torch.uint8)


def _plain_layers(model: Module) -> dict[str, Module]:
    """Return the layers that multiply by a matrix which is not quantised, by name."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if type(getattr(layer, "quant_method", None)) in PLAIN and len(_shape(layer)) == 2
    }


def _shape(layer: Module) -> tuple[int, ...]:
    """Return the shape of a layer's weights before packing, which may leave none behind."""
    parameters, _ = get_layerwise_info(layer).restore_metadata
    return tuple(parameters["weight"].shape) if "weight" in parameters else ()


def _quantised_layers(model: Module) -> dict[str, Module]:
    """Return the layers that multiply by a matrix which is quantised, by name."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, LinearBase)
        and isinstance(layer.quant_method, LinearMethodBase)
        and type(layer.quant_method) not in PLAIN
    }


def _width(layer: Module) -> int:
    """Return the size of a layer's input, on this rank."""
    if type(layer.quant_method) in PLAIN:
        return _shape(layer)[1]
    return int(getattr(layer, "input_size_per_partition", layer.input_size))


def _places(layer: Module, version: int) -> list[int]:
    columns = _width(layer)
    count = min(COLUMNS, columns)
    return [(version + number * columns // count) % columns for number in range(count)]


def _ask(layer: Module, places: list[int]) -> Tensor:
    """Return columns of the weights by which a layer answers, [places, outputs]."""
    if type(layer.quant_method) in PLAIN:
        parameters, _ = get_layerwise_info(layer).restore_metadata
        dtype, device = parameters["weight"].dtype, layer.weight.device
    else:
        dtype, device = layer.params_dtype, next(tensor.device for _, tensor in _own(layer))
    ones = torch.zeros(len(places), _width(layer), dtype=dtype, device=device)
    ones[range(len(places)), places] = 1
    product: Tensor = layer.quant_method.apply(layer, ones)
    return product


def _keep(layer: Module) -> None:
    """Keep what a layer's kernel was made of as long as the kernel, if that reads it by address."""
    handler = getattr(getattr(getattr(layer, "scheme", None), "kernel", None), "dnnl_handler", None)
    if handler is not None:
        handler.made_of = _own(layer)


def _other_answers(name: str) -> EngineError:
    return EngineError(f"layer {name!r} does not answer by the weights just loaded, but by others")


def _tied(layers: dict[str, Module]) -> list[Module]:
    """Return the layers that share their weights with another."""
    sharers: dict[int, list[Module]] = {}
    for layer in layers.values():
        if layer.weight.numel():
            sharers.setdefault(layer.weight.data_ptr(), []).append(layer)
    return [layer for group in sharers.values() if len(group) > 1 for layer in group]


@contextmanager
def _packing(
    model: Module, before: Callable[[Module], None], after: Callable[[Module], None]
) -> Iterator[list[float]]:
    """Show every layer just before and after its weights are packed; yield the seconds of each packing."""
    seconds: list[float] = []

    def watch(method: Any) -> None:
        original = method.process_weights_after_loading

        def process(layer: Module) -> None:
            before(layer)
            began = perf_counter()
            with _experts_packed(layer):
                original(layer)
            seconds.append(perf_counter() - began)
            after(layer)

        method.process_weights_after_loading = process

    methods = {
        id(layer.quant_method): layer.quant_method
        for layer in model.modules()
        if hasattr(getattr(layer, "quant_method", None), "process_weights_after_loading")
    }
    try:
        for method in methods.values():
            watch(method)
        yield seconds
    finally:
        for method in methods.values():
            vars(method).pop("process_weights_after_loading", None)


@contextmanager
def _experts_packed(layer: Module) -> Iterator[None]:
    """Pack a layer's experts for a CPU, unless vLLM does meanwhile."""
    experts = packing.packer(layer)
    if experts is None:
        yield
        return
    done = []
    original = experts.process_weights_after_loading

    def process(layer: Module) -> None:
        original(layer)
        done.append(layer)

    experts.process_weights_after_loading = process
    try:
        yield
        if not done:
            original(layer)
    finally:
        del experts.process_weights_after_loading


def _add(digest: Any, name: str, values: Tensor) -> None:
    if values.is_floating_point():
        values = values.to(torch.float32) + 0  # which makes -0.0 the 0.0 that some kernels give
    digest.update(f"{name}{[*values.shape]}".encode())
    digest.update(values.cpu().contiguous().numpy())
