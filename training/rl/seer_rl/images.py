"""Images before the model in training: read and made ready as engines do, with the places that it gives them.

What a response says of images is text: a token of an image's that the model has written itself stands for no
image, in the engines as here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from seer_host.images import PromptImage, decode_image
from torch import Tensor

from seer_core.errors import ConfigError
from seer_rl.batches import MicroBatch

__all__ = ["ModelImages"]

MOST_READY_BYTES = 256 << 20
"""Of images that are ready for the model; others are made ready again."""

IMAGE = 1
"""The kind of a token, as ``get_rope_index`` of transformers has it."""


class ModelImages:
    """The images of a model of transformers that places them on axes of height and width, as Qwen-VL's do."""

    def __init__(self, model: Any, directory: Path) -> None:
        """Read how the model's images are made ready.

        Raises:
            ConfigError: the directory does not say.
        """
        import transformers

        auto: Any = transformers.AutoImageProcessor
        try:
            self._processor: Any = auto.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"the trainer cannot read how {directory} prepares images: {error}") from error
        self._model = model
        config = model.config
        self._marks = torch.tensor([config.image_token_id, config.video_token_id])
        self._ready: dict[str, tuple[Tensor, Tensor]] = {}
        """Patches and grids by digest, those that were needed last at the end."""
        self._bytes = 0

    @staticmethod
    def fit(model: Any) -> bool:
        """Return whether a model takes images in such a way."""
        return hasattr(model.base_model, "get_rope_index") and hasattr(model.config, "image_token_id")

    @contextmanager
    def before(self, batch: MicroBatch) -> Iterator[dict[str, Tensor]]:
        """Hold the arguments by which the model sees a micro-batch, on the model's device.

        Raises:
            PromptError: the file of an image is gone, or has changed.
        """
        device = self._model.device
        kinds = torch.zeros_like(batch.ids)
        for each in batch.images:
            kinds[each.row, each.begin : each.end] = IMAGE
        ready = [self._made_ready(each.image) for each in batch.images]
        grids = [grid for _, grid in ready]
        positions = self._positions(batch, kinds, grids)
        # The model looks for places by their token: those that it has written itself are hidden from it.
        written = torch.isin(batch.ids, self._marks) & (kinds != IMAGE)
        arguments = {"input_ids": batch.ids.masked_fill(written, 0), "position_ids": positions}
        if ready:
            patches = torch.cat([patches for patches, _ in ready])
            arguments |= {"pixel_values": patches, "image_grid_thw": torch.stack(grids)}
        ids = batch.ids.to(device)
        embedding = self._model.get_input_embeddings()
        hook = embedding.register_forward_pre_hook(lambda _, given: (ids, *given[1:]))
        try:
            yield {name: each.to(device) for name, each in arguments.items()}
        finally:
            hook.remove()

    def _positions(self, batch: MicroBatch, kinds: Tensor, grids: list[Tensor]) -> Tensor:
        """Return the places of text, and those on the axes of time, height and width: [4, rows, width]."""
        positions = batch.positions[None].repeat(4, 1, 1)
        left = iter(grids)
        for row, begin, end in _samples(batch):
            here = kinds[row, begin:end]
            count = sum(each.row == row and begin <= each.begin < end for each in batch.images)
            if count:
                own = torch.stack([next(left) for _ in range(count)])
                found, _ = self._model.base_model.get_rope_index(
                    batch.ids[None, row, begin:end], here[None], image_grid_thw=own
                )
                positions[1:, row, begin:end] = found[:, 0]
        return positions

    def _made_ready(self, image: PromptImage) -> tuple[Tensor, Tensor]:
        """Return the patches of an image and their grid: time, height and width."""
        found = self._ready.pop(image.digest, None)
        if found is None:
            made = self._processor(images=[decode_image(image.read())], return_tensors="pt")
            found = made["pixel_values"], made["image_grid_thw"][0]
            self._bytes += found[0].nbytes
        self._ready[image.digest] = found
        while self._bytes > MOST_READY_BYTES and len(self._ready) > 1:
            patches, _ = self._ready.pop(next(iter(self._ready)))
            self._bytes -= patches.nbytes
        return found


def _samples(batch: MicroBatch) -> Iterator[tuple[int, int, int]]:
    """Yield the row, begin and end of each sample; that of the last in a row includes the padding."""
    for row, positions in enumerate(batch.positions):
        ends = [*(positions == 0).nonzero()[:, 0].tolist(), len(positions)]
        yield from ((row, begin, end) for begin, end in pairwise(ends))
