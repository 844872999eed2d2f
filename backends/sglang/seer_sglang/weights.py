"""New weights into a running model, and the proof that they have arrived.

SGLang loads in place, by the code of the first load, and skips a tensor of an unknown name.  So
parameters are filled with NaNs before, and none may be left.  Quantised ones hold no NaN; of these each layer
must have been written to.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from seer_worker.weights.checkpoint import TensorHeader
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase, LinearMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.model_loader.utils import set_default_torch_dtype
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from seer_core.errors import EngineError
from seer_core.ports.weights import WeightSource

__all__ = ["expect_all_loaded", "fingerprint", "load", "quantises"]

SAMPLED = 4096
"""At most about so many values of a tensor enter a fingerprint."""
PLAIN = (UnquantizedLinearMethod, UnquantizedFusedMoEMethod)
WITH_NAN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def expect_all_loaded(model: torch.nn.Module, tensors: Mapping[str, TensorHeader]) -> None:
    """Raise EngineError if a model has more weights than its directory.

    On a CPU SGLang fills what is too small with zeros.  Embeddings do not count: it may pad the vocabulary.
    """
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    wanted, given = (
        sum(size for name, size in each.items() if "embed" not in name and "lm_head" not in name)
        for each in (sizes, {name: math.prod(header.shape) for name, header in tensors.items()})
    )
    if tensors and wanted > given:
        raise EngineError(
            f"its config.json describes {wanted:,} weights besides embeddings, and its safetensors hold"
            f" {given:,}; put the right config.json beside them"
        )


def quantises(model: torch.nn.Module) -> bool:
    """Return whether a layer is quantised; SGLang takes formats of which it may quantise none of a model."""
    methods = [getattr(layer, "quant_method", None) for layer in model.modules()]
    return any(
        isinstance(each, LinearMethodBase | FusedMoEMethodBase) and not isinstance(each, PLAIN)
        for each in methods
    )


def load(runner: Any, source: WeightSource, version: int) -> str:
    """Load what a source reads into a model runner's model; return the fingerprint of what it is now.

    Raises:
        EngineError: not all of the model was loaded; it is of no use any more.
    """
    model, device = runner.model, torch.device(runner.device)
    DefaultModelLoader.restore_weights_before_loading(model, device)
    marked = _mark(model, runner.model_config.quantization is None)
    layers = [(name, layer, _storages(layer)) for name, layer in model.named_modules()]
    with set_default_torch_dtype(runner.model_config.dtype):
        with _Written() as written:
            DefaultModelLoader.load_weights_only(model, source.tensors(), device)
        for name, parameter in marked.items():
            if parameter.isnan().any():
                raise EngineError(f"SGLang loaded no new weights into {name!r}")
        for name, layer, before in layers:
            matrix = any(parameter.ndim >= 2 for parameter in layer.parameters(recurse=False))
            if matrix and _storages(layer) <= before - written.storages:
                raise EngineError(f"SGLang loaded no new weights into layer {name!r}")
        DefaultModelLoader.postprocess_weights(model, device)
    return fingerprint(model, version)


def fingerprint(model: torch.nn.Module, version: int) -> str:
    """Return what stands for a model's weights; ``version`` chooses which values of large ones count."""
    digest = hashlib.sha256()
    stored = set(model.state_dict())
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in stored]
    for name, tensor in [*model.named_parameters(), *buffers]:
        step = -(-tensor.numel() // SAMPLED) or 1
        values = tensor.detach().flatten()[version % step :: step].to(torch.float32)
        digest.update(f"{name}{[*tensor.shape]}".encode())
        digest.update(values.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


@torch.no_grad()
def _mark(model: torch.nn.Module, plain: bool) -> dict[str, torch.nn.Parameter]:
    """Make parameters NaNs, unless a layer is quantised, which may have some that no checkpoint has."""
    marked = {
        f"{name}.{part}" if name else part: parameter
        for name, layer in model.named_modules()
        if plain or getattr(layer, "quant_method", None) is None
        for part, parameter in layer.named_parameters(recurse=False)
        if parameter.dtype in WITH_NAN
    }
    for parameter in marked.values():
        parameter.fill_(torch.nan)
    return marked


class _Written(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the memory that is written to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.storages.add(_storage(args[0]))
        return func(*args, **(kwargs or {}))


def _storages(layer: torch.nn.Module) -> set[int]:
    return {_storage(parameter) for parameter in layer.parameters(recurse=False)}


def _storage(tensor: torch.Tensor) -> int:
    reference: Any = StorageWeakRef
    return int(reference(tensor.untyped_storage()).cdata)
