"""Images in TRL's training: what it could not train on is refused."""

from __future__ import annotations

from collections.abc import Sequence

from seer_core.errors import EngineError
from seer_core.model import Completion

__all__ = ["require_no_places"]


def require_no_places(completions: Sequence[Completion], image_token: int) -> None:
    """Raise EngineError if a response has a token that TRL would take for the place of an image."""
    for each in completions:
        if each.attachments or image_token in each.token_ids:
            raise EngineError(
                f"response {each.request_id} has tokens of images itself, for which TRL has no images, so"
                " that it cannot train on it"
            )
