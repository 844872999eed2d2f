"""The images of a worker: their files, and what the engine takes of those that were needed last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import attrs
from seer_host.images import IMAGES, decode_image

from seer_core.errors import SeerError
from seer_core.ports.engine import ChunkJob
from seer_worker.process.adapter import Rejected

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["PlacedImage", "PreparedImages"]

T = TypeVar("T")

MOST_PREPARED_BYTES = 512 << 20
"""Of images that are ready for the model; others are made ready again from their files."""


@attrs.frozen
class PlacedImage(Generic[T]):
    """An image of a chunk: as the engine takes it, and where its tokens are."""

    digest: str
    prepared: T
    offset: int
    length: int


class PreparedImages(Generic[T]):
    """The images of one instance.

    Args:
        engine: its name, for refusals.
        prepare: makes an image ready; returns it, its number of tokens, and its bytes.  It takes the token
            that stands for images, too.
        remedy: ends the refusal of an image of which the engine makes another number of tokens.
        most_bytes: of images that are kept ready.
    """

    def __init__(
        self,
        engine: str,
        prepare: Callable[[Image, int], tuple[T, int, int]],
        remedy: str,
        most_bytes: int = MOST_PREPARED_BYTES,
    ) -> None:
        self._name, self._make, self._remedy, self._most_bytes = engine, prepare, remedy, most_bytes
        self._files: dict[str, bytes] = {}
        self._ready: dict[str, tuple[T, int, int]] = {}
        """Those that are ready, that which was needed last at the end."""
        self._bytes = 0
        self.seen = False
        """Whether there have been any."""

    def hold(self, digest: str, data: bytes) -> None:
        """Take the file of an image."""
        self._files[digest] = data
        self.seen = True

    def drop(self, digests: Sequence[str]) -> None:
        """Forget images."""
        for digest in digests:
            self._files.pop(digest, None)
            if (found := self._ready.pop(digest, None)) is not None:
                self._bytes -= found[2]

    def of(self, job: ChunkJob) -> list[PlacedImage[T]]:
        """Return the images of a chunk, in their order.

        Raises:
            Rejected: the engine refuses one, or makes something else of it than the prompt has places for.
        """
        found = []
        for image in job.attachments.get(IMAGES, ()):
            prepared, tokens, _ = self._made_ready(image["digest"], job.token_ids[image["offset"]])
            if tokens != image["length"]:
                raise Rejected(
                    f"{self._name} makes {tokens} tokens of an image for which the prompt has"
                    f" {image['length']}; {self._remedy}"
                )
            found.append(PlacedImage(image["digest"], prepared, image["offset"], tokens))
        return found

    def _made_ready(self, digest: str, token_id: int) -> tuple[T, int, int]:
        found = self._ready.pop(digest, None)
        if found is None:
            if (data := self._files.get(digest)) is None:
                raise Rejected(f"the image {digest} was not sent to this instance")
            try:
                found = self._make(decode_image(data), token_id)
            except (SeerError, ValueError) as error:
                raise Rejected(f"{self._name} refuses an image: {error}") from error
            self._bytes += found[2]
        self._ready[digest] = found
        while self._bytes > self._most_bytes and len(self._ready) > 1:
            self._bytes -= self._ready.pop(next(iter(self._ready)))[2]
        return found
