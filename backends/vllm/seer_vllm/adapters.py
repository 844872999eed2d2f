"""A LoRA adapter beside a running model, and the proof that the model answers by it.

vLLM 0.32 wraps the layers that can have adapters.  There is one at a time, for all requests of a version, so
it has the one slot and one number; names differ, for they are a part of the key of each block of KV.

vLLM itself drops an adapter's tensors without a word where it has wrapped no layer for them.  So each module
is looked for before, and afterwards the wrapped layers must hold every factor, bit for bit, and zeros where
there is none.  The layers' own weights are checked and loaded with the wrappers off, that rename them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

import structlog
import torch
from seer_worker.process.adapter import Rejected
from seer_worker.weights.adapters import Adapter
from vllm.lora.layers import BaseLayerWithLoRA, LogitsProcessorWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name

from seer_core.errors import EngineError
from seer_vllm import internals

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ID", "Adapters", "unwrapped"]

log = structlog.get_logger("seer")

ID = 1
"""vLLM's number of the adapter, whichever it is."""


@contextmanager
def unwrapped(model: Any) -> Iterator[Any]:
    """Take the wrappers off a model's layers within a ``with`` block."""
    wrapped = [
        (name, layer)
        for name, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, BaseLayerWithLoRA)
    ]
    places = []
    for name, layer in wrapped:
        parent, _, own = name.rpartition(".")
        places.append((model.get_submodule(parent), own, layer))
    for module, own, layer in places:
        setattr(module, own, layer.base_layer)
    try:
        yield model
    finally:
        for module, own, layer in places:
            setattr(module, own, layer)


class Adapters:
    """One worker's part of the adapter beside the model."""

    def __init__(self, manager: Any) -> None:
        internals.check_adapters(manager)
        self._manager = manager
        self._layers: dict[str, Any] = manager._adapter_manager.modules
        self._parts: dict[str, list[str]] = manager._adapter_manager.packed_modules
        self._loaded = False

    def check(self, adapter: Adapter) -> None:
        """Raise Rejected if vLLM would not compute with all of an adapter."""
        most = self._manager.lora_config.max_lora_rank
        if adapter.rank > most:
            raise Rejected(f"the adapter has the rank {adapter.rank}: set lora_rank of [engine.vllm] to it")
        try:
            PEFTHelper.from_dict(dict(adapter.config)).validate_legal(self._manager.lora_config)
        except ValueError as error:
            raise Rejected(f"vLLM refuses the adapter: {error}") from error
        known = {part for name, layer in self._layers.items() for part in self._names(name, layer)}
        for name in adapter.tensors:
            module = self._module(name)
            if module not in known:
                raise Rejected(
                    f"vLLM keeps no adapter beside {module!r}; train without it, or leave lora_rank out, so"
                    " that adapters are merged"
                )

    def load(self, adapter: Adapter) -> None:
        """Put an adapter in the place of the one before.

        Raises:
            EngineError: a layer does not hold what was loaded; the model is of no use any more.
        """
        began = perf_counter()
        inner = self._manager._adapter_manager
        mapper = getattr(inner.model, "hf_to_vllm_mapper", None)
        lora = LoRAModel.from_lora_tensors(
            ID,
            {name: tensor.clone() for name, tensor in adapter.tensors.items()},  # vLLM scales them in place
            PEFTHelper.from_dict(dict(adapter.config)),
            device="cpu",
            dtype=self._manager.lora_config.lora_dtype,
            model_vocab_size=self._manager.vocab_size,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        given = {}
        for name, each in lora.loras.items():
            each.optimize()
            given[name] = each.lora_a, each.lora_b
        self.drop()
        inner.add_adapter(lora)
        inner.activate_adapter(ID)
        self._loaded = True
        self._expect(given)
        log.info("adapter_loaded", rank=adapter.rank, loaded_s=round(perf_counter() - began, 4))

    def drop(self) -> None:
        """Forget the adapter, and leave zeros in its place: some kernels look at it for every request."""
        self._manager.remove_all_adapters()
        for layer in self._layers.values():
            layer.reset_lora(0)
        self._loaded = False

    def joined(self, whole: str) -> str:
        """Return the fingerprint of whole weights and the adapter beside them, if there is one."""
        if not self._loaded:
            return whole
        recipe, colon, found = whole.rpartition(":")
        digest = hashlib.sha256(found.encode())
        for name, layer in self._layers.items():
            for part, values in zip("ab", _stacked(layer), strict=True):
                for number, each in enumerate(values):
                    digest.update(f"{name}.{part}{number}{[*each.shape]}".encode())
                    digest.update(each.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return f"{recipe}{colon}{digest.hexdigest()[:32]}"

    def _expect(self, given: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Raise EngineError unless the layers hold these factors, and no others."""
        for name, layer in self._layers.items():
            names = self._names(name, layer)
            parts = _of_rank(layer, [given.get(part, (None, None)) for part in names])
            a, b = _stacked(layer)
            for part, expected, *own in zip(names, parts, a, b, strict=bool(names)):
                if not all(map(_holds, own, expected)):
                    raise EngineError(f"layer {name!r} does not hold the adapter's {part!r} as it was loaded")

    def _names(self, name: str, layer: Any) -> Sequence[str]:
        """Return the modules whose factors a layer holds, in its order; none if it packs them otherwise."""
        if not isinstance(layer, BaseLinearLayerWithLoRA | LogitsProcessorWithLoRA):
            return ()
        names = self._parts.get(name, [name])
        return names if len(names) == len(_stacked(layer)[0]) else ()

    def _module(self, tensor: str) -> str:
        """Return vLLM's name of the module to which a tensor belongs."""
        mapper = getattr(self._manager._adapter_manager.model, "hf_to_vllm_mapper", None)
        renamed = None if mapper is None else mapper.get_rename_mapper()
        return str(parse_fine_tuned_lora_name(tensor, renamed)[0])


Pair = tuple[torch.Tensor | None, torch.Tensor | None]
"""The factors of a module; None for both if the adapter has none."""


def _of_rank(layer: Any, pairs: Sequence[Pair]) -> Sequence[Pair]:
    """Return the parts of factors that this rank's layer holds, as the layer itself divides them."""
    if getattr(layer, "tp_size", 1) == 1 or not isinstance(layer, BaseLinearLayerWithLoRA) or not pairs:
        return pairs  # of the output head each rank holds all
    if len(pairs) > 1:
        a, b = zip(*pairs, strict=True)
        return list(zip(layer.slice_lora_a([*a]), layer.slice_lora_b([*b]), strict=True))
    [(one_a, one_b)] = pairs
    if one_a is None or one_b is None:
        return pairs
    return [(layer.slice_lora_a(one_a), layer.slice_lora_b(one_b))]


def _stacked(layer: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the factors in a layer's one slot, [rank, inputs] and [outputs, rank], padded with zeros."""
    a, b = layer.lora_a_stacked, layer.lora_b_stacked
    if isinstance(a, torch.Tensor):
        a, b = (a,), (b,)
    return [each[0, 0] for each in a], [each[0, 0] for each in b]


def _holds(found: Tensor, expected: Tensor | None) -> bool:
    """Return whether a slot holds a factor in its first rows and columns, and zeros elsewhere."""
    whole = torch.zeros_like(found)
    if expected is not None:
        rows, columns = expected.shape
        whole[:rows, :columns] = expected
    return torch.equal(found, whole)
