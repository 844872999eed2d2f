"""The model that ``TorchTrainer`` trains, in the form of transformers."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import logging as transformers_logging

from seer_core.errors import ConfigError
from seer_rl.batches import MicroBatch
from seer_rl.config import TrainTable
from seer_rl.images import ModelImages
from seer_rl.losses import token_logprobs
from seer_rl.routing_replay import replayed_routing

__all__ = ["HuggingFaceModel", "copy_all_but_weights"]

WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}


class HuggingFaceModel:
    """A causal language model of transformers, in evaluation mode; ``images`` is None if it takes none."""

    def __init__(self, table: TrainTable, directory: Path) -> None:
        """Load the model of a directory.

        Raises:
            ConfigError: it cannot be loaded, or not be trained with samples that are packed.
        """
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._device = torch.device(table.torch.device)
        self._first = directory
        self._model = self._read(directory)
        layers = getattr(self._model.config.get_text_config(), "layer_types", None) or ()
        if table.torch.packed and "linear_attention" in layers:
            raise ConfigError(
                f"[train.torch].packed: the model in {directory} has layers of linear attention, which would"
                " carry their state from one sample to the next; leave it out"
            )
        self.images = ModelImages(self._model, directory) if ModelImages.fit(self._model) else None

    def _read(self, directory: Path) -> Any:
        try:
            config = AutoConfig.from_pretrained(directory, local_files_only=True)
            sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
            kind: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
            loaded: Any = kind.from_pretrained(
                directory, dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"the trainer cannot load the model in {directory}: {error}") from error
        model, found = loaded
        if missing := sorted(found["missing_keys"]):
            raise ConfigError(
                f"the model in {directory} lacks {len(missing)} of the tensors that its config describes,"
                f" {missing[0]!r} first; name a whole one"
            )
        # In training mode a model with dropout would not be the one that wrote the responses.
        return model.to(self._device).eval()

    @property
    def vocab_size(self) -> int:
        """How many tokens the model has."""
        return int(self._model.config.get_text_config().vocab_size)

    def parameters(self) -> Iterable[Parameter]:
        """Return all parameters, tied ones once."""
        parameters: Iterable[Parameter] = self._model.parameters()
        return parameters

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Return the log-probs of the trained tokens; logits are computed for every token.

        A mixture takes the experts that the batch has, if it has some.
        """
        with ExitStack() as stack:
            if self.images is None:
                ids, positions = batch.ids.to(self._device), batch.positions.to(self._device)
                inputs = {"input_ids": ids, "position_ids": positions}
            else:
                inputs = stack.enter_context(self.images.before(batch))
            if batch.experts is not None:
                experts = batch.experts.to(self._device).flatten(0, 1)
                stack.enter_context(replayed_routing(self._model, experts))
            logits = self._model(**inputs, use_cache=False).logits
        return token_logprobs(batch.trained(logits), batch.targets.to(self._device))

    def export(self, directory: Path) -> None:
        """Write a whole model, with the tokenizer's files of the first one."""
        self._model.save_pretrained(directory)
        copy_all_but_weights(self._first, directory)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the weights as ``save_pretrained`` names them, tied ones once."""
        once = remove_tied_weights_from_state_dict(self._model.state_dict(), self._model)
        tensors: dict[str, Tensor] = revert_weight_conversion(self._model, once)
        return tensors

    def adapter_config(self) -> dict[str, Any] | None:
        """Return nothing, for ``tensors`` are whole weights."""
        return None

    def load(self, directory: Path) -> None:
        """Load the weights in a directory."""
        self._model.load_state_dict(self._read(directory).state_dict())


def copy_all_but_weights(model: Path, directory: Path) -> None:
    """Copy a model's other files, such as the tokenizer's, where there are none of that name yet."""
    for file in sorted(model.iterdir()):
        # An index names the files of the first weights, which are not there.
        weights = file.suffix in WEIGHTS or file.name.endswith(".index.json")
        if file.is_file() and not weights and not (directory / file.name).exists():
            shutil.copyfile(file, directory / file.name)
