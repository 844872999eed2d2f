"""Images in vLLM: processed once in a worker, and given to it with the places that a prompt has for them.

A chunk comes with its prompt's places filled in, so vLLM does not fill them again behind what is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from seer_worker.process.images import PreparedImages

from seer_core.ports.engine import ChunkJob

if TYPE_CHECKING:
    from PIL.Image import Image
    from vllm.inputs.engine import MultiModalInput
    from vllm.multimodal.inputs import MultiModalKwargsItem
    from vllm.v1.engine.llm_engine import LLMEngine

__all__ = ["VllmImages"]

REMEDY = "leave mm_processor_kwargs out of engine_args, which change that"


class VllmImages(PreparedImages["MultiModalKwargsItem"]):
    """The images of one instance."""

    def __init__(self, engine: LLMEngine) -> None:
        super().__init__("vLLM", self._process, REMEDY)
        self._engine = engine

    def forget_encoded(self) -> None:
        """Drop what the model has made of images, whose weights may change."""
        if self.seen:  # the emulation's worker has no such memory, and no images
            self._engine.reset_encoder_cache()

    def input(self, job: ChunkJob, salt: str) -> MultiModalInput:
        """Return the tokens of a chunk with its images.

        Raises:
            Rejected: vLLM makes something else of an image than the prompt has places for.
        """
        # Here, so that a vLLM without these names still serves text.
        from vllm.inputs.engine import mm_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        images = self.of(job)
        return mm_input(
            job.token_ids,
            MultiModalKwargsItems({"image": [image.prepared for image in images]}),
            {"image": [image.digest for image in images]},
            {"image": [PlaceholderRange(image.offset, image.length) for image in images]},
            cache_salt=salt,
        )

    def _process(self, image: Image, token_id: int) -> tuple[MultiModalKwargsItem, int, int]:
        processor = self._engine.renderer.get_mm_processor()
        made: Any = processor([token_id], processor.info.parse_mm_data({"image": [image]}))
        [item], [place] = made["mm_kwargs"]["image"], made["mm_placeholders"]["image"]
        tensors = item.get_data().values()
        return item, place.length, sum(each.nbytes for each in tensors if hasattr(each, "nbytes"))
