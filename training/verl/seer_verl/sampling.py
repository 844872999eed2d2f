"""verl's sampling parameters by Seer's names, and the ends of responses by verl's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["STOPS", "record_fields"]

STOPS = {"stop": "completed", "length": "completed", "aborted": "aborted"}
"""verl's reason for which a response is over, by Seer's."""


def record_fields(
    sampling_params: Mapping[str, Any], most: int, controls: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of a prompt's record, and the sampling parameters for which there is none.

    ``most`` tokens are written where the parameters give no number; ``controls`` are those of vLLM's
    parameters that Seer has by the same names.
    """
    given = dict(sampling_params)
    given.pop("logprobs", None)
    fields = {
        "max_tokens": given.pop("max_tokens", given.pop("max_new_tokens", most)),
        "temperature": float(given.pop("temperature", 1.0)),
        "top_p": float(given.pop("top_p", 1.0)),
        "top_k": max(0, given.pop("top_k", -1)),
        **{name: given.pop(name) for name in controls if given.get(name) is not None},
    }
    return fields, given
