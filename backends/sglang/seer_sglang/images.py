"""Images in SGLang: made ready once in a rank, and given to it with the places that a prompt has for them.

SGLang's prefix cache finds an image by the tokens that stand in its places: numbers beyond the vocabulary.
Here they follow from the image's digest, so instances agree on them, and the keys of a pool have them too.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from seer_worker.process.images import PlacedImage, PreparedImages
from sglang.srt.layers.attention import vision
from sglang.srt.managers import mm_schedule
from sglang.srt.managers.schedule_batch import (
    Modality,
    MultimodalDataItem,
    MultimodalInputs,
    MultimodalProcessorOutput,
)
from torch import Tensor

from seer_core.errors import EngineError
from seer_core.ports.engine import ChunkJob

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["SglangImages", "install", "positions"]

REMEDY = "copy the model's files anew"

Prepared = tuple[Tensor, Tensor, int]
"""An image's patches, their grid [1, 3] of time, height and width, and how many a token has in a row."""


class SglangImages(PreparedImages[Prepared]):
    """The images of one rank."""

    def __init__(self, model_dir: str, *, trust_remote_code: bool) -> None:
        super().__init__("SGLang", self._prepare, REMEDY)
        self._model_dir, self._trust = model_dir, trust_remote_code

    def forget_encoded(self) -> None:
        """Drop what the model has made of images, whose weights may change."""
        if self.seen:
            mm_schedule.embedding_cache.clear()

    def inputs(self, job: ChunkJob) -> tuple[array[int], MultimodalInputs | None]:
        """Return a chunk's tokens as the prefix cache has them, and its images if it has any."""
        images = self.of(job)
        if not images:
            return array("q", job.token_ids), None
        items = list(map(_item, images))  # of its own, for SGLang empties them
        text = MultimodalProcessorOutput.build_padded_input_ids(job.token_ids, items)
        assert text is not None
        places, delta = positions(len(text), images)
        inputs = MultimodalInputs(items, mrope_positions=places, mrope_position_delta=delta)
        return array("q", text), inputs

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor

        auto: Any = AutoImageProcessor
        try:
            return auto.from_pretrained(self._model_dir, local_files_only=True, trust_remote_code=self._trust)
        except (OSError, ImportError) as error:
            raise EngineError(f"it cannot read how {self._model_dir} prepares images: {error}") from error

    def _prepare(self, image: Image, token_id: int) -> tuple[Prepared, int, int]:
        made = self._processor(images=[image], return_tensors="pt")
        patches, grid, merged = made["pixel_values"], made["image_grid_thw"], self._processor.merge_size
        return (patches, grid, merged), int(grid.prod()) // merged**2, patches.nbytes


def positions(tokens: int, images: Sequence[PlacedImage[Prepared]]) -> tuple[Tensor, Tensor]:
    """Return the places of a text on the axes of time, height and width, int64 [3, tokens].

    And, [1, 1], how much further on the place of the next token is than their number.  What stands between
    and behind images is text.  SGLang's own function looks for images by their tokens, which a response may
    have written too.
    """
    parts, begin, place = [], 0, 0
    for image in images:
        parts.append(_text(image.offset - begin, place))
        place += image.offset - begin
        _, grid, merged = image.prepared
        time, height, width = grid[0].tolist()
        sides = time, height // merged, width // merged
        parts.append(place + torch.cartesian_prod(*map(torch.arange, sides)).view(-1, 3).T)
        place += max(sides)
        begin = image.offset + image.length
    parts.append(_text(tokens - begin, place))
    return torch.cat(parts, 1), torch.tensor([[place - begin]])


def _text(tokens: int, place: int) -> Tensor:
    return torch.arange(place, place + tokens).expand(3, -1)


def _item(image: PlacedImage[Prepared]) -> MultimodalDataItem:
    patches, grid, _ = image.prepared
    item = MultimodalDataItem(
        modality=Modality.IMAGE,
        feature=patches,
        offsets=[(image.offset, image.offset + image.length - 1)],
        model_specific_data={"image_grid_thw": grid},
    )
    item.set_identity(hashlib.sha256(image.digest.encode()).digest())
    return item


def install(model: Any) -> None:
    """Have a model on a CPU encode each image alone, and without a compiler.

    It would compute a square as large as all patches of a step, and other bits for each batch.  And SGLang
    has torch compile the rotation of its patches, for which the first image of each instance would wait.
    """
    vision.apply_rotary_pos_emb = vision.apply_rotary_pos_emb_native_eager
    if encode := getattr(model, "get_image_feature", None):
        model.get_image_feature = lambda items: [encode([item]) for item in items]
