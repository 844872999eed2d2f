"""Images of prompts: named by a digest, bounded, and decoded alike in every process, or refused."""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs

from seer_core.errors import ConfigError, PromptError, printable

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "IMAGES",
    "IMAGE_PART",
    "MOST_IMAGE_BYTES",
    "MOST_PIXELS",
    "ImageTokenizer",
    "PlacedImages",
    "PromptImage",
    "decode_image",
    "png_of",
    "read_image_file",
]

IMAGES = "images"
"""The attachment that says where a prompt's images are: the digest, offset and length of each."""

IMAGE_PART: Mapping[str, Any] = {"type": "image"}
"""Stands among the parts of a message where an image is; no other part of this type does."""

MOST_IMAGE_BYTES = 32 << 20
"""Of an image's file."""

MOST_PIXELS = 50_000_000
"""Of an image, before a model's processor makes it smaller; three bytes each are held while it is decoded."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Pillow's names of the formats that are read."""

CLEAR = ("LA", "La", "PA", "RGBA", "RGBa")
"""Pillow's modes of images that are transparent in places."""
PLAIN = ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr")
"""Its modes of others that become 8-bit RGB."""

_opening = threading.Lock()


@runtime_checkable
class ImageTokenizer(Protocol):
    """The further method of a ``Tokenizer`` whose model takes images.

    ``encode_chat`` then takes messages with ``IMAGE_PART``, of which each becomes one place.
    """

    def place_images(
        self, token_ids: Sequence[int], sizes: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return a prompt in which each place of an image has become as many tokens as the image takes.

        Args:
            token_ids: the prompt, with one token for each image, or with as many as each takes.
            sizes: width and height of each image, in pixels.

        Returns:
            The tokens, and for each image the offset of its first one and their number.

        Raises:
            PromptError: there are more or fewer images than places, or the model takes no such size.
        """
        ...


@attrs.frozen
class PromptImage:
    """An image of a prompt that has been read: which one it is, its size, and where its bytes are.

    Its bytes are held, or read again from the file when an instance needs them.
    """

    digest: str
    """32 hexadecimal digits that depend on the file's bytes."""
    width: int
    """The pixels of a row, once the image is upright."""
    height: int
    """The rows."""
    path: Path | None = None
    data: bytes | None = attrs.field(default=None, repr=False)

    @classmethod
    def of(cls, data: bytes, path: Path | None = None) -> PromptImage:
        """Decode an image; its bytes are held unless it has a ``path``.

        Raises:
            PromptError: as ``decode_image``.
        """
        width, height = decode_image(data).size
        return cls(_digest(data), width, height, path, data if path is None else None)

    def read(self) -> bytes:
        """Return the file's bytes.

        Raises:
            PromptError: the file is gone, or has other bytes by now.
        """
        if self.data is not None:
            return self.data
        assert self.path is not None
        data = read_image_file(self.path)
        if _digest(data) != self.digest:
            raise PromptError(f"the image {printable(str(self.path))} has changed since the prompt was read")
        return data


class PlacedImages(dict[str, Any]):
    """The attachments of a prompt with images: where each is among the tokens, as plain data.

    ``sources`` has the images by digest.  They are no part of what is written or sent, which the digests are.
    """

    def __init__(self, images: list[PromptImage], places: list[tuple[int, int]]) -> None:
        found = [
            {"digest": image.digest, "offset": offset, "length": length}
            for image, (offset, length) in zip(images, places, strict=True)
        ]
        super().__init__({IMAGES: found})
        self.sources = {image.digest: image for image in images}

    @classmethod
    def joined(cls, before: Mapping[str, Any], after: PlacedImages, start: int = 0) -> PlacedImages:
        """Return the images of ``before``, if it has any, and others, ``start`` tokens further on."""
        first = list(before.placed()) if isinstance(before, PlacedImages) else []
        placed = [*first, *((image, start + at, tokens) for image, at, tokens in after.placed())]
        return cls([image for image, _, _ in placed], [(at, tokens) for _, at, tokens in placed])

    def since(self, offset: int) -> PlacedImages:
        """Return the images that stand from ``offset`` on."""
        found = [each for each in self.placed() if each[1] >= offset]
        return PlacedImages([image for image, _, _ in found], [(at, tokens) for _, at, tokens in found])

    def placed(self) -> Iterator[tuple[PromptImage, int, int]]:
        """Yield each image with its offset and its number of tokens, in their order."""
        for each in self[IMAGES]:
            yield self.sources[each["digest"]], each["offset"], each["length"]

    @property
    def digests(self) -> list[str]:
        """The digest of each image, in their order."""
        return [each["digest"] for each in self[IMAGES]]


def read_image_file(path: Path) -> bytes:
    """Return the bytes of an image's file.

    Raises:
        PromptError: it cannot be read, is no plain file, or is larger than ``MOST_IMAGE_BYTES``.
    """
    name = printable(str(path))
    try:
        if not path.is_file():
            raise PromptError(f"the image {name} is no file")
        with path.open("rb") as file:
            data = file.read(MOST_IMAGE_BYTES + 1)
    except (OSError, ValueError) as error:
        fact = getattr(error, "strerror", None) or str(error)
        raise PromptError(f"the image {name} cannot be read: {fact}") from error
    require_few_bytes(len(data))
    return data


def require_few_bytes(size: int) -> None:
    """Raise PromptError for an image of more than ``MOST_IMAGE_BYTES``."""
    if size > MOST_IMAGE_BYTES:
        raise PromptError(f"the image has more than {MOST_IMAGE_BYTES >> 20} MiB; make it smaller")


def decode_image(data: bytes) -> Image:
    """Return an image as 8-bit RGB.

    It is turned upright as its EXIF data says, what is transparent becomes white, and other colours become
    RGB as Pillow converts them, without a profile.  Its size is looked at before it is decoded.

    Raises:
        PromptError: it is none, is damaged, has several frames, too many pixels, or more than 8 bits.
        ConfigError: there is no Pillow.
    """
    require_few_bytes(len(data))
    image = _open(data)
    if image.width * image.height > MOST_PIXELS:
        size = f"{image.width:,} x {image.height:,}"
        raise PromptError(f"the image has {size} pixels; it may have {MOST_PIXELS:,} in all: make it smaller")
    try:
        if (frames := getattr(image, "n_frames", 1)) > 1:
            raise PromptError(f"the image has {frames:,} frames; give one picture")
        if image.mode not in (*CLEAR, *PLAIN):
            raise PromptError(f"the image has pixels of the kind {image.mode}; save it with 8 bits a colour")
        return _as_rgb(image)
    except PromptError:
        raise
    except Exception as error:  # each decoder raises its own
        raise PromptError(f"the image is damaged: {printable(str(error)) or type(error).__name__}") from error


def png_of(image: Any) -> bytes:
    """Return an image of PIL's as the bytes of a PNG, in the colours in which processors of images see it.

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


def _as_rgb(image: Image) -> Image:
    from PIL import Image as pillow
    from PIL import ImageOps

    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode in CLEAR or "transparency" in image.info:
        clear = image.convert("RGBA")
        image = pillow.alpha_composite(pillow.new("RGBA", clear.size, "white"), clear)
    return image if image.mode == "RGB" else image.convert("RGB")


def _open(data: bytes) -> Image:
    """Read an image's header."""
    try:
        from PIL import Image as pillow
        from PIL import UnidentifiedImageError
    except ImportError as error:
        raise ConfigError("images need Pillow, which is not installed: pip install pillow") from error
    try:
        with _opening, warnings.catch_warnings():  # which threads share
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            return pillow.open(BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        known = ", ".join(FORMATS[:-1])
        raise PromptError(f"it is no image that can be read; give {known} or {FORMATS[-1]}") from error
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise PromptError(f"the image has more than {MOST_PIXELS:,} pixels; give it with fewer") from error
    except Exception as error:
        raise PromptError(f"the image is damaged: {printable(str(error)) or type(error).__name__}") from error


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
