"""The splitter: chunks of one size, the last one shorter."""

from seer_core.model import Request

__all__ = ["Chunks"]


class Chunks:
    """Gives each chunk ``min(chunk_tokens, what is left)`` tokens (paper, divided rollout)."""

    def __init__(self, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens

    def split(self, request: Request) -> int:
        """Return the next chunk's ``max_tokens``."""
        return min(self.chunk_tokens, request.remaining_tokens)
