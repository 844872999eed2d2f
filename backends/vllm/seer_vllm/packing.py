"""Where the packed experts of a CPU keep their weights.

On a CPU vLLM's experts compute with a packed copy that replaces the weights.  Packing moves values and
changes none, so marks that are packed in the same way show where a value of a checkpoint lies.  What is found
there is the same on every CPU, however its kernels like experts.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import attrs
import torch
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from seer_core.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Places", "packer", "places"]

WEIGHTS = ("w13_weight", "w2_weight")
MARKS = 256
"""The largest whole number up to which every dtype of weights has all."""
SAMPLED = 4096
"""At most about so many values of all experts of a layer are looked at."""


@attrs.frozen
class Places:
    """Places in the weights of one expert: as a checkpoint has them, and as they are packed, by name."""

    unpacked: dict[str, list[int]]
    packed: dict[str, list[int]]

    def given(self, layer: Any) -> dict[str, Tensor]:
        """Return the values of a layer whose experts have not been packed yet, [experts, places]."""
        return {name: _values(layer, name, each) for name, each in self.unpacked.items()}

    def found(self, layer: Any) -> dict[str, Tensor]:
        """Return the same values of a layer whose experts are packed."""
        return {name: _values(layer, name, each) for name, each in self.packed.items()}


def packer(layer: Any) -> Any | None:
    """Return what packs a layer's experts for a CPU; None if it has none, or another kernel."""
    kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    return experts if hasattr(experts, "isa") else None


def places(model: Any, version: int) -> dict[Any, Places]:
    """Return the places that ``version`` chooses, for every layer whose experts are packed for a CPU.

    Raises:
        EngineError: packing does more than move values.
    """
    known: dict[tuple[object, ...], Places] = {}
    found = {}
    for layer in model.modules():
        experts = packer(layer)
        if experts is not None:
            shapes, _ = get_layerwise_info(layer).restore_metadata
            kind = type(experts), *((shapes[name].shape, shapes[name].dtype) for name in WEIGHTS)
            if kind not in known:
                known[kind] = _places(layer, experts, version)
            found[layer] = known[kind]
    return found


def _places(layer: Any, packs: Any, version: int) -> Places:
    """Find places by packing an expert of marks.

    Raises:
        EngineError: packing does more than move values.
    """
    shapes, _ = get_layerwise_info(layer).restore_metadata
    marked: Any = torch.nn.Module()
    unpacked: dict[str, list[int]] = {}
    packed: dict[str, list[int]] = {}
    marked.moe_config = layer.moe_config
    for name in WEIGHTS:
        experts, rows, columns = shapes[name].shape
        size = rows * columns
        count = max(1, min(MARKS, SAMPLED // experts, size))
        step = (size // count) | 1  # odd, so that it meets many columns
        unpacked[name] = sorted({(version + number * step) % size for number in range(count)})
        weights = torch.zeros(1, rows, columns, dtype=shapes[name].dtype)
        marks = torch.arange(1, len(unpacked[name]) + 1, dtype=weights.dtype)
        weights.view(-1)[unpacked[name]] = marks
        marked.register_parameter(name, torch.nn.Parameter(weights, requires_grad=False))
    copy.copy(packs).process_weights_after_loading(marked)
    for name in WEIGHTS:
        values = getattr(marked, name).detach().flatten()
        places = values.nonzero().flatten()
        order = values[places].to(torch.float32).argsort()
        packed[name] = places[order].tolist()
        if values[packed[name]].tolist() != [*range(1, len(unpacked[name]) + 1)]:
            raise EngineError("vLLM packs experts in another way than by moving their weights; report this")
    return Places(unpacked, packed)


def _values(layer: Any, name: str, places: list[int]) -> Tensor:
    values: Tensor = getattr(layer, name).detach().flatten(1)[:, places].clone()
    return values
