"""A model of which an adapter alone is trained, by PEFT."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Parameter

from seer_core.errors import ConfigError
from seer_rl.config import TrainTable
from seer_rl.models import HuggingFaceModel

__all__ = ["AdaptedModel"]

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"


class AdaptedModel(HuggingFaceModel):
    """The first weights, which stay as they are, and a LoRA adapter in float32."""

    def __init__(self, table: TrainTable, directory: Path) -> None:
        """Load the model of a directory, and give it an adapter that changes nothing yet.

        Raises:
            ConfigError: it cannot be loaded, PEFT is not installed, or the model has none of the targets.
        """
        try:
            import peft
        except ImportError as error:
            raise ConfigError(f"[train.lora] needs PEFT ({error}): pip install 'seer-rl[lora]'") from error
        super().__init__(table, directory)
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=table.lora.rank,
            lora_alpha=table.lora.alpha,
            target_modules=sorted(table.lora.targets) or "all-linear",
        )
        self._peft: Any = peft
        try:
            self._adapted: Any = peft.get_peft_model(self._model, config)
        except ValueError as error:
            raise ConfigError(f"[train.lora].targets: {error}") from error

    def parameters(self) -> Iterable[Parameter]:
        """Return the adapter's parameters."""
        return [each for each in self._adapted.parameters() if each.requires_grad]

    def export(self, directory: Path) -> None:
        """Write the adapter, as PEFT does."""
        from safetensors.torch import save_file

        tensors = {name: each.detach().cpu().contiguous() for name, each in self.tensors().items()}
        save_file(tensors, directory / TENSORS, metadata={"format": "pt"})
        (directory / CONFIG).write_text(json.dumps(self.adapter_config(), indent=2))

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the adapter's tensors by PEFT's names."""
        tensors: dict[str, Tensor] = self._peft.get_peft_model_state_dict(self._adapted)
        return tensors

    def adapter_config(self) -> dict[str, Any]:
        """Return what PEFT writes about the adapter."""
        config = self._adapted.peft_config["default"].to_dict()
        config |= {"inference_mode": True, "base_model_name_or_path": str(self._first)}
        plain: dict[str, Any] = json.loads(json.dumps(config, default=_plain, sort_keys=True))
        return plain

    def load(self, directory: Path) -> None:
        """Load the adapter in a directory."""
        file = directory / TENSORS
        try:
            tensors = load_file(file)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file} holds no adapter: {error}") from error
        own = self.tensors()
        flaws = [name for name in {*own, *tensors} if name not in own or name not in tensors]
        flaws += [name for name, each in own.items() if name in tensors and tensors[name].shape != each.shape]
        if flaws:
            raise ConfigError(f"{file} holds another adapter than [train.lora] describes: see {min(flaws)!r}")
        with torch.no_grad():
            for name, each in own.items():
                each.copy_(tensors[name])


def _plain(value: Any) -> Any:
    """Return a set in order, and anything else by its name."""
    return sorted(value) if isinstance(value, set | frozenset) else str(getattr(value, "value", value))
