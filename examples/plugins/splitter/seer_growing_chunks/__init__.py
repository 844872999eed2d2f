"""Chunks that grow as a response goes on."""

from typing import Annotated

from msgspec import Meta, Struct
from seer_core.model import Request
from seer_core.plugins.hookspecs import hookimpl
from seer_core.ports.policy import Splitter


class Settings(Struct, frozen=True):
    """``[plugin.growing_chunks]``: a chunk is ``factor`` times the one before."""

    first_tokens: Annotated[int, Meta(ge=1)] = 256
    factor: Annotated[int, Meta(ge=1)] = 2


class GrowingChunks(Splitter):
    """Splitter whose chunks grow."""

    def __init__(self, first_tokens: int, factor: int) -> None:
        self.first_tokens = first_tokens
        self.factor = factor

    def split(self, request: Request) -> int:
        """Return the next chunk's ``max_tokens``."""
        tokens: int = self.first_tokens * self.factor**request.chunks
        return min(tokens, request.remaining_tokens)


@hookimpl
def seer_make_splitter(settings: Settings) -> Splitter:
    """Fill the slot."""
    return GrowingChunks(settings.first_tokens, settings.factor)
