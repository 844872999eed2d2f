"""A LoRA adapter, as PEFT saves it: read, checked, and merged with the whole weights to which it belongs."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import attrs
import torch

from seer_core.errors import EngineError
from seer_core.ports.weights import WeightSource

__all__ = ["Adapter", "Factors", "Merged", "make_adapter"]

PREFIX = "base_model.model."
"""PEFT's, before the name of a module of the model."""
NAME = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])(\.default)?\.weight")
UNLOADED = (
    "alora_invocation_tokens",
    "arrow_config",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "velora_config",
)
"""Options of PEFT's ``LoraConfig`` by which an adapter is more, or something else, than pairs of factors."""
OWN_BASE = ("corda", "loftq", "olora", "pissa")
"""Ways to begin an adapter that change the weights to which it belongs."""


class Factors(NamedTuple):
    """An adapter adds ``scale * b @ a`` to a matrix."""

    a: torch.Tensor
    """[rank, inputs]."""
    b: torch.Tensor
    """[outputs, rank]."""
    scale: float


@attrs.frozen(eq=False)
class Adapter:
    """An adapter that has been checked."""

    config: Mapping[str, Any]
    """What is in its ``adapter_config.json``."""
    tensors: Mapping[str, torch.Tensor]
    """Its tensors by PEFT's names; they must not be written to."""
    factors: Mapping[str, Factors]
    """Its factors by the name of the module in checkpoints."""

    @property
    def rank(self) -> int:
        """The highest rank of its factors."""
        return max(len(each.a) for each in self.factors.values())


class Merged:
    """Whole weights with an adapter added to them; a ``WeightSource``."""

    def __init__(self, base: WeightSource, adapter: Adapter) -> None:
        self._base, self._adapter = base, adapter

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensor after tensor of the whole weights; sums are taken in float32, and rounded once.

        Raises:
            EngineError: a tensor to which the adapter adds is not there, or is quantised.
        """
        left = dict(self._adapter.factors)
        for name, tensor in self._base.tensors():
            factors = left.pop(name.removesuffix(".weight"), None) if name.endswith(".weight") else None
            if factors is None:
                yield name, tensor
                continue
            if not tensor.is_floating_point() or tensor.itemsize == 1:
                raise EngineError(
                    f"tensor {name!r} is quantised, and an adapter cannot be merged with it; let the engine"
                    " keep adapters beside the model"
                )
            a, b = factors.a.to(torch.float32), factors.b.to(torch.float32)
            merged = tensor.to(torch.float32) + factors.scale * (b @ a)
            yield name, merged.to(tensor.dtype)
        if left:
            raise EngineError(f"the adapter belongs to module {next(iter(left))!r}, which the weights lack")

    def joined(self, fingerprint: str) -> str:
        """Return a fingerprint of the sums, which looks at some of them, with all values of the adapter."""
        recipe, colon, found = fingerprint.rpartition(":")
        digest = hashlib.sha256(found.encode())
        for module, (*pair, scale) in sorted(self._adapter.factors.items()):
            for each in pair:
                digest.update(f"{module} {scale} {each.dtype} {[*each.shape]}".encode())
                digest.update(each.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return f"{recipe}{colon}{digest.hexdigest()[:32]}"


def make_adapter(
    config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> Adapter:
    """Return an adapter of PEFT's config and tensors.

    Args:
        config: what is in its ``adapter_config.json``.
        tensors: its tensors by PEFT's names.
        shapes: those of the model's tensors by their names in checkpoints; none: they are not compared.

    Raises:
        EngineError: it is no LoRA adapter, has more than factors, or does not belong to this model.
    """
    _check_config(config)
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = NAME.fullmatch(name.removeprefix(PREFIX))
        if match is None:
            raise EngineError(f"tensor {name!r} is none of a LoRA adapter's, named lora_A or lora_B")
        pairs.setdefault(match["module"], {})[match["factor"]] = tensor
    factors = {}
    for module, pair in pairs.items():
        if len(pair) < 2:
            there, lacking = ("lora_A", "lora_B") if "A" in pair else ("lora_B", "lora_A")
            raise EngineError(f"module {module!r} has {there} and no {lacking}; save the whole adapter")
        factors[module] = _factors(module, pair["A"], pair["B"], config, shapes)
    _check_targets(config, factors)
    return Adapter(dict(config), dict(tensors), factors)


def _check_config(config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise EngineError(f"the adapter has PEFT's type {kind}, and LORA alone is loaded")
    for name, types in (("r", int), ("lora_alpha", int | float)):
        value = config.get(name)
        if not isinstance(value, types) or isinstance(value, bool) or not value > 0:
            raise EngineError(f"the adapter's config has {name} = {value!r}, which must be a number above 0")
    if config.get("bias", "none") != "none":
        raise EngineError(f"the adapter trains biases (bias = {config['bias']!r}), which are not loaded")
    for name in UNLOADED:
        if config.get(name):
            raise EngineError(f"the adapter's config sets {name}, which is not loaded; train without it")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(OWN_BASE):
        raise EngineError(
            f"the adapter began with init_lora_weights = {start!r}, which changes the model's own weights;"
            " convert it to a plain one by PEFT's path_initial_model_for_weight_conversion"
        )


def _factors(
    module: str,
    a: torch.Tensor,
    b: torch.Tensor,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
) -> Factors:
    rank = _matching(config.get("rank_pattern"), module, config["r"])
    alpha = _matching(config.get("alpha_pattern"), module, config["lora_alpha"])
    for name, tensor, size in (("lora_A", a, a.shape[:1]), ("lora_B", b, b.shape[1:])):
        if tensor.ndim != 2 or size != (rank,):
            raise EngineError(
                f"the {name} of {module!r} has the shape {[*tensor.shape]}, and its rank is {rank} by the"
                " adapter's config"
            )
    if shapes:
        shape = shapes.get(f"{module}.weight")
        if shape is None:
            raise EngineError(
                f"the adapter belongs to module {module!r}, which the model lacks; it was trained on another"
            )
        if shape != (len(b), a.shape[1]):
            raise EngineError(
                f"the adapter's module {module!r} multiplies [{len(b)}, {a.shape[1]}], the model's"
                f" {[*shape]}; it was trained on another model"
            )
    return Factors(a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _matching(pattern: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """Return the value of the first key that names a module, as PEFT looks one up."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def _check_targets(config: Mapping[str, Any], factors: Mapping[str, Factors]) -> None:
    targets = config.get("target_modules")
    if not isinstance(targets, list | tuple | set):
        return  # a pattern, or PEFT's own choice
    for target in targets:
        if not any(module == target or module.endswith(f".{target}") for module in factors):
            raise EngineError(
                f"the adapter's config names the target module {target!r}, of which it has no tensors; save"
                " the whole adapter"
            )
