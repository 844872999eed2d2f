"""Images of TRL's prompts: what its processor sees, sent to the engines, with the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from itertools import groupby
from typing import Any

from seer_core.errors import ConfigError, EngineError
from seer_core.model import Completion, PromptGroup

__all__ = ["one_place_each", "png_of", "require_no_places", "require_same_prompts"]


def png_of(image: Any) -> bytes:
    """Return an image of PIL's as the bytes of a PNG, in the colours in which TRL's processor sees it.

    Raises:
        ConfigError: it is none of PIL's.
    """
    from PIL import Image

    if not isinstance(image, Image.Image):
        raise ConfigError(
            f"an image of a prompt is a {type(image).__name__}, and Seer takes those of PIL; let the dataset"
            " decode its images"
        )
    plain = Image.new("RGB", image.size)  # which has nothing beside its pixels, such as a turn by EXIF data
    plain.paste(image.convert("RGB"))
    file = BytesIO()
    plain.save(file, "PNG", compress_level=1)
    return file.getvalue()


def one_place_each(token_ids: Sequence[int], image_token: int) -> list[int]:
    """Return a prompt with one token in the place of each image, which the processor has made many of."""
    return [
        token
        for token, run in groupby(token_ids)
        for _ in range(1 if token == image_token else len(list(run)))
    ]


def require_same_prompts(groups: Sequence[PromptGroup], prompt_ids: Sequence[Sequence[int]]) -> None:
    """Raise ConfigError if TRL's processor and Seer make other tokens of the images of a group's prompt."""
    row = 0
    for group in groups:
        if list(group.prompt_token_ids) != list(prompt_ids[row]):
            raise ConfigError(
                f"TRL's processor makes {len(prompt_ids[row])} tokens of a prompt with images, and the"
                f" engines {len(group.prompt_token_ids)}; give both the same image processor"
            )
        row += group.n


def require_no_places(completions: Sequence[Completion], image_token: int) -> None:
    """Raise EngineError if a response has a token that TRL would take for the place of an image."""
    for each in completions:
        if each.attachments or image_token in each.token_ids:
            raise EngineError(
                f"response {each.request_id} has tokens of images itself, for which TRL has no images, so"
                " that it cannot train on it"
            )
