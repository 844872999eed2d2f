"""Images in vLLM: processed once in a worker, and given to it with the places that a prompt has for them.

A chunk comes with its prompt's places filled in, so vLLM does not fill them again behind what is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from seer_host.images import IMAGES, decode_image
from seer_worker.process.adapter import Rejected

from seer_core.errors import SeerError
from seer_core.ports.engine import ChunkJob

if TYPE_CHECKING:
    from vllm.inputs.engine import MultiModalInput
    from vllm.multimodal.inputs import MultiModalKwargsItem
    from vllm.v1.engine.llm_engine import LLMEngine

__all__ = ["VllmImages"]

MOST_PROCESSED_BYTES = 512 << 20
"""Of images that are ready for the model; others are made ready again from their files."""


class VllmImages:
    """The images of one instance."""

    def __init__(self, engine: LLMEngine, most_bytes: int = MOST_PROCESSED_BYTES) -> None:
        self._engine = engine
        self._most_bytes = most_bytes
        self._files: dict[str, bytes] = {}
        self._processed: dict[str, tuple[MultiModalKwargsItem, int]] = {}
        """Those that are ready, that which was needed last at the end, each with its tokens."""
        self._bytes = 0
        self._seen = False

    def hold(self, digest: str, data: bytes) -> None:
        """Take the file of an image."""
        self._files[digest] = data
        self._seen = True

    def drop(self, digests: Sequence[str]) -> None:
        """Forget images."""
        for digest in digests:
            self._files.pop(digest, None)
            if (found := self._processed.pop(digest, None)) is not None:
                self._bytes -= _bytes_of(found[0])

    def forget_encoded(self) -> None:
        """Drop what the model has made of images, whose weights may change."""
        if self._seen:  # the emulation's worker has no such memory, and no images
            self._engine.reset_encoder_cache()

    def input(self, job: ChunkJob, salt: str) -> MultiModalInput:
        """Return the tokens of a chunk with its images.

        Raises:
            Rejected: vLLM makes something else of an image than the prompt has places for.
        """
        # Here, so that a vLLM without these names still serves text.
        from vllm.inputs.engine import mm_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        placed = job.attachments[IMAGES]
        items = []
        for image in placed:
            item, tokens = self._ready(image["digest"], job.token_ids[image["offset"]])
            if tokens != image["length"]:
                raise Rejected(
                    f"vLLM makes {tokens} tokens of an image for which the prompt has {image['length']};"
                    " leave mm_processor_kwargs out of engine_args, which change that"
                )
            items.append(item)
        return mm_input(
            job.token_ids,
            MultiModalKwargsItems({"image": items}),
            {"image": [image["digest"] for image in placed]},
            {"image": [PlaceholderRange(image["offset"], image["length"]) for image in placed]},
            cache_salt=salt,
        )

    def _ready(self, digest: str, token_id: int) -> tuple[MultiModalKwargsItem, int]:
        """Return an image as the model takes it, and its number of tokens."""
        found = self._processed.pop(digest, None)
        if found is None:
            found = self._process(digest, token_id)
            self._bytes += _bytes_of(found[0])
        self._processed[digest] = found
        while self._bytes > self._most_bytes and len(self._processed) > 1:
            oldest = next(iter(self._processed))
            self._bytes -= _bytes_of(self._processed.pop(oldest)[0])
        return found

    def _process(self, digest: str, token_id: int) -> tuple[MultiModalKwargsItem, int]:
        if (data := self._files.get(digest)) is None:
            raise Rejected(f"the image {digest} was not sent to this instance")
        try:
            processor = self._engine.renderer.get_mm_processor()
            items = processor.info.parse_mm_data({"image": [decode_image(data)]})
            made: Any = processor([token_id], items)
        except (SeerError, ValueError) as error:
            raise Rejected(f"vLLM refuses an image: {error}") from error
        [item], [place] = made["mm_kwargs"]["image"], made["mm_placeholders"]["image"]
        return item, place.length


def _bytes_of(item: MultiModalKwargsItem) -> int:
    tensors = item.get_data().values()
    return sum(tensor.nbytes for tensor in tensors if hasattr(tensor, "nbytes"))
