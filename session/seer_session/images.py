"""Images of prompts: the parts of messages that name them, what may be read, and where they are placed."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from seer_host.images import (
    IMAGE_PART,
    PlacedImages,
    PromptImage,
    read_image_file,
    require_few_bytes,
)

from seer_core.errors import PromptError, printable, quote
from seer_core.ports.contracts import implemented
from seer_core.ports.engine import Tokenizer

__all__ = ["MOST_IMAGES", "ImageReader", "image_parts", "names_images", "place_images"]

MOST_IMAGES = 256
"""Of one prompt."""

FIELDS = {"image_url": "image_url", "input_image": "image_url", "image": "image"}
"""The types of parts that are images, and the field that names it."""

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
DATA_URL = re.compile(r"data:(image/[A-Za-z0-9.+-]+)?(;[^,;]+)*;base64,", re.ASCII)
LONGEST_NAME = 4096
"""Characters of a path."""

Found = tuple[str, Any]
"""Where an image is named, for an error, and what names it: None if that is in the prompt's ``images``."""


def names_images(record: Mapping[str, Any]) -> bool:
    """Return whether a prompt has images, which are read and decoded beside the event loop."""
    messages = record.get("messages")
    contents = (
        [each.get("content") for each in messages or () if isinstance(each, Mapping)]
        if isinstance(messages, list | tuple)
        else []
    )
    parts = [part for each in contents if isinstance(each, list | tuple) for part in each]
    return bool(record.get("images")) or any(
        isinstance(part, Mapping) and part.get("type") in (*FIELDS,) for part in parts
    )


def image_parts(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[tuple[Mapping[str, Any], ...], list[Found]]:
    """Return messages with ``IMAGE_PART`` in the place of each image, and what names these.

    Raises:
        PromptError: a part of an image has more than its name.
    """
    found: list[Found] = []
    read = tuple(_without_images(number, each, found) for number, each in enumerate(messages))
    return (read if found else tuple(messages)), found


def _without_images(number: int, message: Mapping[str, Any], found: list[Found]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    before = len(found)
    parts: list[Any] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind in FIELDS:
            found.append((f"message {number}", _name_of(number, part, FIELDS[kind])))
            part = IMAGE_PART
        parts.append(part)
    return message if len(found) == before else {**message, "content": parts}


def _name_of(number: int, part: Mapping[str, Any], field: str) -> Any:
    """Return what names the image of a part."""
    given = {name: value for name, value in part.items() if name != "type" and value is not None}
    name = given.pop(field, None)
    if isinstance(name, Mapping):
        given |= {key: value for key, value in name.items() if key != "url" and value is not None}
        name = name.get("url")
    if given.get("detail") == "auto":
        del given["detail"]
    if given:
        further = quote(next(iter(given)))
        raise PromptError(f"message {number} has an image with {further}; leave that out")
    return name


class ImageReader:
    """Reads the images of prompts, each once, from where they may be.

    Args:
        roots: files are read beneath these directories alone; a relative path begins at ``start``, or else at
            the first of them.
        start: the directory of the prompts file; without ``roots`` files are read beneath it.
    """

    def __init__(self, roots: Sequence[str | Path] = (), start: Path | None = None) -> None:
        self._start = start
        self._roots = [Path(each) for each in roots] or ([] if start is None else [start])
        self._read: dict[Path | str, PromptImage] = {}

    def all(self, parts: Iterable[Found], images: Sequence[Any]) -> list[PromptImage]:
        """Return the images of a prompt, those of its messages' parts and of its ``images``, in their order.

        Raises:
            PromptError: one cannot be read, or parts and ``images`` do not fit each other.
        """
        found = list(self._named(list(parts), images))
        if len(found) > MOST_IMAGES:
            raise PromptError(f"the prompt has {len(found):,} images; it may have {MOST_IMAGES}")
        read = []
        for where, name in found:
            try:
                read.append(self.one(name))
            except PromptError as error:
                raise PromptError(f"{where}: {error}") from error
        return read

    def _named(self, parts: Sequence[Found], images: Sequence[Any]) -> Iterator[Found]:
        """Yield what names each image; parts without a name have those of ``images``, in order."""
        listed = [(f"image {number}", name) for number, name in enumerate(images)]
        unnamed = sum(name is None for _, name in parts)
        if parts and unnamed != len(listed):
            raise PromptError(
                f"{unnamed} images of the messages have no name, and `images` names {len(listed)}; give as"
                " many of both"
            )
        if not parts:
            yield from listed
            return
        names = iter(listed)
        for where, name in parts:
            yield next(names) if name is None else (where, name)

    def one(self, name: Any) -> PromptImage:
        """Return the image that a path, a data URL or bytes name.

        Raises:
            PromptError: there is none, or it may not be read.
        """
        if isinstance(name, PromptImage):
            return name
        if isinstance(name, bytes | bytearray | memoryview):
            require_few_bytes(len(name))
            return self._kept(PromptImage.of(bytes(name)))
        if isinstance(name, os.PathLike):
            return self._file(os.fspath(name))
        if not isinstance(name, str):
            raise PromptError(f"an image is {quote(name)}; give a path, a data URL or bytes")
        if name[:5].lower() == "data:":
            return self._kept(PromptImage.of(_bytes_of(name)))
        if name[:7].lower() == "file://":
            return self._file(unquote(name[7:].removeprefix("localhost")))
        if URL.match(name):
            raise PromptError(f"{quote(name)} is a URL, and Seer fetches none; give a path or a data URL")
        return self._file(name)

    def _kept(self, image: PromptImage) -> PromptImage:
        return self._read.setdefault(image.digest, image)

    def _file(self, name: Any) -> PromptImage:
        if not isinstance(name, str) or not name or len(name) > LONGEST_NAME or "\0" in name:
            raise PromptError(f"{quote(name)} is no path of an image")
        if not self._roots:
            raise PromptError(
                f"the image {quote(name)} is a path, and [rollout].image_roots names no directory for paths;"
                " name one, or give a data URL or bytes"
            )
        begin = self._start or self._roots[0]
        try:
            path = (begin / name).resolve(strict=True)
            roots = [root.resolve() for root in self._roots]
        except (OSError, RuntimeError) as error:  # a circle of links
            fact = getattr(error, "strerror", None) or str(error)
            raise PromptError(f"the image {quote(name)} cannot be read: {fact}") from error
        if not any(path.is_relative_to(root) for root in roots):
            shown = ", ".join(printable(str(root)) for root in roots)
            raise PromptError(
                f"the image {quote(name)} is not beneath {shown}; name its directory in [rollout].image_roots"
            )
        if path not in self._read:
            self._read[path] = PromptImage.of(read_image_file(path), path)
        return self._read[path]


def _bytes_of(url: str) -> bytes:
    """Return what a data URL holds."""
    head = DATA_URL.match(url[:1000])
    if head is None:
        raise PromptError(f"{quote(url[:40])} is no data URL of an image; write data:image/png;base64,...")
    coded = url[head.end() :]
    require_few_bytes(len(coded) * 3 // 4 - 2)
    try:
        return base64.b64decode(coded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PromptError(f"the data URL of an image is no base64: {error}") from error


def place_images(
    token_ids: Sequence[int], images: list[PromptImage], tokenizer: Tokenizer | None
) -> tuple[list[int], PlacedImages]:
    """Return a prompt's tokens with as many for each image as the model needs, and the attachments.

    Raises:
        PromptError: there are not as many places for images, or the model takes none of such a size.
    """
    place = implemented(tokenizer, "place_images")
    if place is None:
        raise PromptError("this engine's tokenizer places no images; leave them out")
    ids, places = place(token_ids, [(image.width, image.height) for image in images])
    return ids, PlacedImages(images, places)
