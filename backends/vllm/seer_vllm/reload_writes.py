"""An account of what vLLM's loaders write during a reload, parameter by parameter.

While vLLM 0.32 reloads, a layer's parameters have a shape and no memory.  Its wrapped loaders note what they
are given, and repeat it on memory once the layer is complete.  A model that copies into a parameter without
the parameter's loader writes to nothing: gpt-oss does so with its attention sinks, and with experts that are
not quantised.  vLLM then puts the old weights back, with a warning in the log.  Here such a copy becomes a
call of a wrapped loader.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import layerwise

from seer_core.errors import EngineError
from seer_core.ports.weights import WeightSource

if TYPE_CHECKING:
    from inspect import BoundArguments

    from torch import Tensor

reload: Any = layerwise
"""Untyped, for a function of it is replaced."""

__all__ = ["ReloadWrites"]

Region = tuple[int, tuple[int, ...], tuple[int, ...]]
"""The offset, shape and strides of a view, in elements of its storage."""

aten = torch.ops.aten
WRITES = (aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default)


@attrs.define(eq=False)
class _Part:
    """A parameter of a layer, or a buffer; ``optional``: nothing need be loaded into it."""

    layer: Any
    name: str
    path: str
    size: int
    optional: bool
    regions: set[Region] = attrs.field(factory=set)

    @property
    def written(self) -> int:
        """How many of its values have been written, padding aside."""
        return min(self.size, sum(math.prod(shape) for _, shape, _ in self.regions))


class ReloadWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what a reload writes, and hands over what would be written to nothing."""

    def __init__(self, model: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._parts: dict[int, _Part] = {}
        self._replaced: list[tuple[Any, Any]] = []
        self._on = self._in_loader = False
        self._copied = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch a reload, of the tensors that ``of`` yields."""
        original = reload.get_numel_loaded
        reload.get_numel_loaded = self._loaded_by
        try:
            yield
        finally:
            self._turn(on=False)
            reload.get_numel_loaded = original
            for tensor, loader in reversed(self._replaced):
                tensor.weight_loader = loader

    def _turn(self, on: bool) -> None:
        """Look at every operation from now on, or at none, for that costs microseconds each.

        It is on from each tensor of the source until a loader has been called with it.
        """
        if on != self._on:
            self._on = on
            if on:
                self.__enter__()  # type: ignore[no-untyped-call]
            else:
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _loaded_by(self, loader: Any, arguments: BoundArguments) -> tuple[int, object]:
        """Call a loader; return how many values it copies, as vLLM's ``get_numel_loaded``, and its result."""
        if loader is _copy:  # handed over from within an operation; there is no memory yet
            return math.prod(arguments.arguments["region"][1]), None
        self._copied, self._in_loader = 0, True
        self._turn(on=True)
        try:
            result = loader(*arguments.args, **arguments.kwargs)
        finally:
            self._turn(on=False)
            self._in_loader = False
        parameter = arguments.arguments.get("param")
        size = self._copied if parameter is None else _size(parameter)
        return min(self._copied, size), result

    def of(self, source: WeightSource) -> Iterator[tuple[str, Tensor]]:
        """Yield a source's tensors, with the model's parameters in view as vLLM has laid them out by then."""
        stored = set(self._model.state_dict())
        for name, layer in self._model.named_modules():
            kept_back = (
                is_deferred_attention_layer(layer) and getattr(layer, "quant_method", None) is not None
            )
            parameters = dict(layer.named_parameters(recurse=False))
            for part, tensor in [*parameters.items(), *layer.named_buffers(recurse=False)]:
                path = f"{name}.{part}" if name else part
                if _size(tensor) and path in stored:
                    optional = kept_back or part not in parameters
                    self._parts[_storage(tensor)] = _Part(layer, part, path, _size(tensor), optional)
        for each in source.tensors():
            self._turn(on=True)
            yield each
            self._turn(on=False)

    def expect_all(self) -> None:
        """Raise EngineError with the first parameter that has not been written, or in part only."""
        begun = {part.layer for part in self._parts.values() if part.regions}
        whole = {id(_live(part)) for part in self._parts.values() if part.written == part.size}
        for part in self._parts.values():
            if part.written == part.size or (part.optional and part.layer not in begun):
                continue
            if _live(part) is not None and id(_live(part)) in whole:
                continue  # it is one with another
            if part.written:
                fact = f"vLLM loaded {part.written} of {part.size} values into {part.path!r}"
                raise EngineError(f"{fact}; the others would be no weights at all")
            raise EngineError(f"vLLM loaded no new weights into {part.path!r}; its old ones would answer on")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in WRITES:
            return func(*args, **(kwargs or {}))
        if func is aten.copy_.default:
            self._copied += args[0].numel()
        if (part := self._parts.get(_storage(args[0]))) is not None:
            target = args[0]
            if not target.is_meta or self._in_loader:
                part.regions.add(_region(target))
            elif func is aten.copy_.default:
                part.regions.add(_region(target))
                self._hand_over(part, target, args[1])
                return target
        return func(*args, **(kwargs or {}))

    def _hand_over(self, part: _Part, target: Tensor, source: Tensor) -> None:
        """Let a wrapped loader copy into a parameter's region, once the layer is complete."""
        if not reload.get_layerwise_info(part.layer).can_load():
            raise EngineError(f"vLLM loaded weights into {part.path!r} when its layer was complete")
        parameter = getattr(part.layer, part.name)
        self._replaced.append((parameter, getattr(parameter, "weight_loader", None)))
        parameter.weight_loader = _copy
        reload.make_online_process_loader(part.layer, part.name)(parameter, source, _region(target))


def _copy(param: Tensor, source: Tensor, region: Region) -> None:
    """Load values into a region of a parameter; a loader, whose first argument vLLM looks up by name."""
    offset, shape, strides = region
    param.data.as_strided(shape, strides, offset).copy_(source)


def _size(tensor: Tensor) -> int:
    """Return how many values a checkpoint has for a tensor, which may be padded."""
    return int(getattr(tensor, "weight_loader_numel", tensor.numel()))


def _live(part: _Part) -> Any:
    """Return the parameter by which the layer answers, if it still has one of this name."""
    return getattr(part.layer, part.name, None)


def _region(tensor: Tensor) -> Region:
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())


def _storage(tensor: Tensor) -> int:
    reference: Any = StorageWeakRef
    return int(reference(tensor.untyped_storage()).cdata)
