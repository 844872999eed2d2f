"""verl's sampling parameters by Seer's names, and the ends of responses by verl's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["CONTROLS", "LEAST", "STOPS", "record_fields"]

STOPS = {"stop": "completed", "length": "completed", "aborted": "aborted"}
"""verl's reason for which a response is over, by Seer's."""

LEAST = ("min_tokens", "min_new_tokens")
"""The least tokens of a response, as vLLM and SGLang name them; Seer has the first name."""

PLAIN = (
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
)
CONTROLS: Mapping[str, tuple[str, ...]] = {
    "vllm": (*PLAIN, "allowed_token_ids", "include_stop_str_in_output"),
    "sglang": PLAIN,
}
"""The parameters that Seer has by the same names, by ``rollout.name``."""

SEERS = ("n", "best_of", "beam_width", "output_kind", "seed", "sampling_seed")
"""Those that decide how an answer reads, or what a token is drawn by."""


def record_fields(
    sampling_params: Mapping[str, Any], most: int, controls: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of a prompt's record, and the sampling parameters for which there is none.

    ``most`` tokens are written where the parameters give no number; ``controls`` are those that
    Seer has by the same names.

    Raises:
        ValueError: a parameter is one that Seer sends itself.
    """
    given = {name: value for name, value in sampling_params.items() if value is not None}
    given.pop("logprobs", None)
    if given.get("n") == 1:
        del given["n"]
    for name in SEERS:
        if name in given:
            raise ValueError(f"sampling parameter {name!r} is Seer's to send; leave it out")
    for name in LEAST[1:]:
        if name in given:
            given[LEAST[0]] = given.pop(name)
    fields = {
        "max_tokens": given.pop("max_tokens", given.pop("max_new_tokens", most)),
        "temperature": float(given.pop("temperature", 1.0)),
        "top_p": float(given.pop("top_p", 1.0)),
        "top_k": max(0, given.pop("top_k", -1)),
        **{name: given.pop(name) for name in controls if name in given},
    }
    return fields, given
