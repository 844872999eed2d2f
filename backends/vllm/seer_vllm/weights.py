"""New weights into a running model, and the proof that it answers by them.

What of vLLM 0.32 this works around: on a CPU every linear layer and the output head compute with a packed
copy of their weights, which ``process_weights_after_loading`` makes.  vLLM's reload calls that for the
layers into which it has loaded something.  A head that is tied to the embeddings is not among them, for its
weights are loaded as the embeddings': it would go on with the packed copy of the old ones.  So layers that
share their weights are packed once more after a reload.

Then each layer is asked for single columns of its weights: its product, by any kernel and packing that it
uses, with vectors that are 1 at one place and 0 elsewhere.  Such a product is exact, in every precision and
order of summation, so it must equal, bit for bit, the columns of what was loaded; an old copy gives old ones.
Quantised layers and experts are not asked: their products are not exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

import structlog
import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from seer_core.errors import EngineError
from seer_core.ports.weights import WeightSource

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
        EngineError: a layer does not answer by what was loaded; the model is of no use any more.
    """
    model = worker.model_runner.get_model()
    layers = _plain_layers(model)
    given: dict[Module, Tensor] = {}

    def note(layer: Module) -> None:
        if layer in places:
            given[layer] = layer.weight.detach()[:, places[layer]].t().clone()

    places = {layer: _places(layer, version) for layer in layers.values()}
    began = perf_counter()
    with _watching(note) as packing:
        worker.reload_weights(weights_iterator=source.tensors())
        for layer in _tied(layers):
            layer.quant_method.process_weights_after_loading(layer)
    loaded = perf_counter()
    answers = {}
    for name, layer in layers.items():
        if layer not in given:
            raise EngineError(f"vLLM loaded no new weights into layer {name!r}; its old ones would answer on")
        answers[name] = _ask(layer, places[layer])
        if not torch.equal(answers[name], given[layer]):
            raise EngineError(f"layer {name!r} does not answer by the weights just loaded, but by others")
    found = _digest(model, version, answers)
    packed_s = sum(packing)
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

    ``version`` chooses the columns of large weights that are looked at, so that they change.
    """
    layers = _plain_layers(model)
    return _digest(
        model, version, {name: _ask(each, _places(each, version)) for name, each in layers.items()}
    )


def _digest(model: Module, version: int, answers: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, columns in answers.items():
        _add(digest, name, columns)
    for name, layer in model.named_modules():
        if type(getattr(layer, "quant_method", None)) not in (*PLAIN, type(None)):
            continue  # packed as its kernel likes it
        for part, tensor in layer.named_parameters(recurse=False):
            if tensor.numel() and (name not in answers or part != "weight"):
                step = -(-tensor.numel() // SAMPLED)
                _add(digest, f"{name}.{part}", tensor.detach().flatten()[version % step :: step])
    return digest.hexdigest()[:32]


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


def _places(layer: Module, version: int) -> list[int]:
    columns = _shape(layer)[1]
    count = min(COLUMNS, columns)
    return [(version + number * columns // count) % columns for number in range(count)]


def _ask(layer: Module, places: list[int]) -> Tensor:
    """Return columns of the weights by which a layer answers, [places, outputs]."""
    parameters, _ = get_layerwise_info(layer).restore_metadata
    shape = len(places), _shape(layer)[1]
    ones = torch.zeros(shape, dtype=parameters["weight"].dtype, device=layer.weight.device)
    ones[range(len(places)), places] = 1
    product: Tensor = layer.quant_method.apply(layer, ones)
    return product


def _tied(layers: dict[str, Module]) -> list[Module]:
    """Return the layers that share their weights with another."""
    sharers: dict[int, list[Module]] = {}
    for layer in layers.values():
        if layer.weight.numel():
            sharers.setdefault(layer.weight.data_ptr(), []).append(layer)
    return [layer for group in sharers.values() if len(group) > 1 for layer in group]


@contextmanager
def _watching(note: Callable[[Module], None]) -> Iterator[list[float]]:
    """Show every plain layer just before its weights are packed; yield the seconds of each packing."""
    packing: list[float] = []

    def watch(kind: Any, original: Callable[[Any, Module], None]) -> None:
        def process(method: Any, layer: Module) -> None:
            note(layer)
            began = perf_counter()
            original(method, layer)
            packing.append(perf_counter() - began)

        kind.process_weights_after_loading = process

    originals: list[tuple[Any, Any]] = [(kind, kind.process_weights_after_loading) for kind in PLAIN]
    try:
        for kind, original in originals:
            watch(kind, original)
        yield packing
    finally:
        for kind, original in originals:
            kind.process_weights_after_loading = original


def _add(digest: Any, name: str, values: Tensor) -> None:
    values = values.to(torch.float32) + 0  # which makes -0.0 the 0.0 that some kernels give
    digest.update(f"{name}{[*values.shape]}".encode())
    digest.update(values.cpu().contiguous().numpy())
