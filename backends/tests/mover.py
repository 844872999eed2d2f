"""A placer that moves every chunk, and does harm on the way."""

from bench.placers import AlwaysMigrate

__all__ = ["Mover"]


class Mover(AlwaysMigrate):
    """Sends each chunk to another instance than the last.

    From so many chunks on it does each of its ``acts`` in turn, until that returns true.
    """

    def __init__(self, acts=()):
        self.acts = list(acts)
        self.placed = 0

    def place(self, request, chunk_tokens, instances):
        found = super().place(request, chunk_tokens, instances)
        if found is not None:
            self.placed += 1
            if self.acts and self.placed >= self.acts[0][0] and self.acts[0][1]():
                del self.acts[0]
        return found
