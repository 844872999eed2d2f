"""How many tokens a model makes of an image, from its configuration alone.

An engine's own processor would need torch and the image in this process.  A worker compares what it makes of
each image with what is said here, so that no wrong count gets by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Self

import attrs
from msgspec import Meta, Struct
from seer_host.json_files import JsonFormat

from seer_core.errors import ConfigError, PromptError

__all__ = ["IMAGE_MODELS", "ImagePlaces"]

IMAGE_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""The ``model_type`` of models whose images become patches of one size, in whole windows."""

MOST_RATIO = 200
"""Of an image's longer side to its shorter one, as their processor has it."""

REMEDY = "copy the model's files anew"

Positive = Annotated[int, Meta(ge=1)]


class VisionConfig(Struct, frozen=True):
    """The part of a model's configuration that is about images."""

    patch_size: Positive
    spatial_merge_size: Positive = 2


class SeeingConfig(Struct, frozen=True):
    """The ``config.json`` of a model that may see."""

    model_type: str = ""
    image_token_id: int | None = None
    vision_config: VisionConfig | None = None


class EdgeSizes(Struct, frozen=True):
    """The least and the most pixels that an image is made to have."""

    shortest_edge: Positive | None = None
    longest_edge: Positive | None = None


class ImageProcessorConfig(Struct, frozen=True):
    """How images are made ready: ``preprocessor_config.json``."""

    size: EdgeSizes = EdgeSizes()
    min_pixels: Positive | None = None
    max_pixels: Positive | None = None


class ProcessorConfig(Struct, frozen=True):
    """``processor_config.json``, in which transformers 5 writes that of images too."""

    image_processor: ImageProcessorConfig | None = None


CONFIG = JsonFormat[SeeingConfig](SeeingConfig, "no model's configuration", REMEDY, ConfigError)
OF_IMAGES = JsonFormat[ImageProcessorConfig](
    ImageProcessorConfig, "no configuration of images", REMEDY, ConfigError
)
PROCESSOR = JsonFormat[ProcessorConfig](ProcessorConfig, "no processor's configuration", REMEDY, ConfigError)


@attrs.frozen
class ImagePlaces:
    """The tokens of images of a model: one for each window of so many pixels in a row and a column."""

    token_id: int
    """The token that stands for an image, and then for each window of it."""
    window: int
    """The pixels of a window's side."""
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280

    @classmethod
    def read(cls, model_dir: Path) -> Self | None:
        """Read the configuration of a model; None if it takes no images that can be placed.

        Raises:
            ConfigError: a file is damaged.
        """
        config = CONFIG.read(model_dir / "config.json")
        vision, token_id = config.vision_config, config.image_token_id
        if config.model_type not in IMAGE_MODELS or vision is None or token_id is None:
            return None
        found = None
        if (path := model_dir / "processor_config.json").exists():
            found = PROCESSOR.read(path).image_processor
        if found is None and (path := model_dir / "preprocessor_config.json").exists():
            found = OF_IMAGES.read(path)
        found = found or ImageProcessorConfig()
        given = {
            "min_pixels": found.min_pixels or found.size.shortest_edge,
            "max_pixels": found.max_pixels or found.size.longest_edge,
        }
        limits = {name: value for name, value in given.items() if value is not None}
        return cls(token_id, vision.patch_size * vision.spatial_merge_size, **limits)

    def tokens(self, width: int, height: int) -> int:
        """Return how many tokens an image takes, by the rule of ``smart_resize`` of transformers.

        Raises:
            PromptError: it is too narrow.
        """
        if max(width, height) > MOST_RATIO * min(width, height):
            raise PromptError(
                f"an image of {width} x {height} pixels is too narrow: its longer side may be {MOST_RATIO}"
                " times the shorter one"
            )
        window, pixels = self.window, width * height
        columns, rows = round(width / window), round(height / window)
        if rows * columns * window**2 > self.max_pixels:
            shrink = math.sqrt(pixels / self.max_pixels)
            columns, rows = (max(1, math.floor(side / shrink / window)) for side in (width, height))
        elif rows * columns * window**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / pixels)
            columns, rows = (math.ceil(side * grow / window) for side in (width, height))
        return rows * columns

    def place(
        self, token_ids: Sequence[int], sizes: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Do as ``ImageTokenizer.place_images``."""
        counts = [self.tokens(*size) for size in sizes]
        found = sum(token == self.token_id for token in token_ids)
        wrong = PromptError(
            f"the prompt has {found} places for images, and {len(counts)} images that take {sum(counts)}"
            " tokens; give one place for each image, or for each of these tokens"
        )
        if found not in (len(counts), sum(counts)):
            raise wrong
        ids: list[int] = []
        places = []
        at = 0
        for count in counts:
            begin = token_ids.index(self.token_id, at)
            taken = 1 if found == len(counts) else count
            if any(token != self.token_id for token in token_ids[begin : begin + taken]):
                raise wrong
            ids += token_ids[at:begin]
            places.append((len(ids), count))
            ids += [self.token_id] * count
            at = begin + taken
        return [*ids, *token_ids[at:]], places
