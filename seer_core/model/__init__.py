"""The nouns: requests, chunks, events, results, and the arrays that hold tokens."""

from seer_core.model.requests import *  # noqa: F403, all of its ``__all__``
from seer_core.model.sampling import *  # noqa: F403, all of its ``__all__``
