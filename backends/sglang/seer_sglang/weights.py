"""New weights into a running model, and the proof that they have arrived."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from seer_worker.weights.checkpoint import TensorHeader
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.model_loader.utils import set_default_torch_dtype

from seer_core.errors import EngineError
from seer_core.ports.weights import WeightSource

__all__ = ["expect_all_loaded", "fingerprint", "load"]

SAMPLED = 4096
"""At most about so many values of a tensor enter a fingerprint."""


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


def load(runner: Any, source: WeightSource, version: int) -> str:
    """Load what a source reads into a model runner's model; return the fingerprint of what it is now.

    Every weight is made a NaN before: SGLang skips a tensor of an unknown name, and what it
    has not loaded would answer on as it was.

    Raises:
        EngineError: not all of the model was loaded; it is of no use any more.
    """
    model = runner.model
    plain = runner.model_config.quantization is None
    if plain:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.fill_(torch.nan)
    device = torch.device(runner.device)
    DefaultModelLoader.restore_weights_before_loading(model, device)
    with set_default_torch_dtype(runner.model_config.dtype):
        DefaultModelLoader.load_weights_and_postprocess(model, source.tensors(), device)
    if plain:
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and parameter.isnan().any():
                raise EngineError(f"SGLang loaded no new weights into {name!r}")
    return fingerprint(model, version)


def fingerprint(model: torch.nn.Module, version: int) -> str:
    """Return what stands for a model's weights; ``version`` chooses which values of large ones count."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        step = -(-parameter.numel() // SAMPLED) or 1
        values = parameter.detach().flatten()[version % step :: step].to(torch.float32)
        digest.update(f"{name}{[*parameter.shape]}".encode())
        digest.update(values.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]
