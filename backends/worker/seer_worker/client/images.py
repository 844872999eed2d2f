"""The images that a worker holds: each is sent to it once, and the oldest go when there are too many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from seer_host.images import PlacedImages, PromptImage

from seer_worker.wire import DropImages, HoldImage

__all__ = ["HeldImages", "read_all"]

MOST_HELD_BYTES = 1 << 30
"""Of images' files in a worker, unless its running chunks need more."""


def read_all(images: Sequence[PromptImage]) -> dict[str, bytes]:
    """Return the files of images by digest.

    Raises:
        PromptError: an image cannot be read any more.
    """
    return {image.digest: image.read() for image in images}


class HeldImages:
    """The images that a worker has been sent, by digest, and those that its running chunks need."""

    def __init__(self, most_bytes: int = MOST_HELD_BYTES) -> None:
        self._most_bytes = most_bytes
        self._sizes: dict[str, int] = {}
        """The bytes of each image, that which was needed last at the end."""
        self._needed: Counter[str] = Counter()
        self._of: dict[str, list[str]] = {}

    def clear(self) -> None:
        """Take note that the worker is gone."""
        self._sizes.clear()
        self._needed.clear()
        self._of.clear()

    def unread(self, attachments: Mapping[str, Any]) -> list[PromptImage]:
        """Return the images of a chunk that the worker has not, and whose bytes are in files."""
        sources = attachments.sources if isinstance(attachments, PlacedImages) else {}
        return [each for each in sources.values() if each.data is None and each.digest not in self._sizes]

    def open(
        self, job_id: str, attachments: Mapping[str, Any], read: Mapping[str, bytes]
    ) -> Iterator[HoldImage | DropImages]:
        """Yield what has to be sent to the worker before a chunk; ``read`` has what is ``unread``."""
        if not isinstance(attachments, PlacedImages):
            return
        digests = list(dict.fromkeys(attachments.digests))
        for digest in digests:
            size = self._sizes.pop(digest, None)
            if size is None:
                data = read.get(digest) or attachments.sources[digest].read()
                size = len(data)
                yield HoldImage(digest, data)
            self._sizes[digest] = size
        self._of[job_id] = digests
        self._needed.update(digests)
        if dropped := self._surplus():
            yield DropImages(dropped)

    def close(self, job_id: str) -> None:
        """Take note that a chunk is over."""
        for digest in self._of.pop(job_id, ()):
            self._needed[digest] -= 1
            if not self._needed[digest]:
                del self._needed[digest]

    def _surplus(self) -> tuple[str, ...]:
        """Forget the images that were needed longest ago, until the others fit; return them."""
        total, dropped = sum(self._sizes.values()), []
        for digest in list(self._sizes):
            if total <= self._most_bytes:
                break
            if digest not in self._needed:
                dropped.append(digest)
                total -= self._sizes.pop(digest)
        return tuple(dropped)
