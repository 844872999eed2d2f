"""The doctor's check of a model's tokenizer and end tokens."""

from __future__ import annotations

from collections.abc import Callable

from seer_core.errors import SeerError
from seer_core.plugins.hookspecs import Check
from seer_worker.client.fleet import WorkerFleet
from seer_worker.tokenizer import ModelTokenizer

__all__ = ["tokenizer_check"]


def tokenizer_check(part: str, make_fleet: Callable[[], WorkerFleet]) -> Check:
    """Have the tokenizer of a fleet read, as a run would, and describe it; nothing else is started."""
    try:
        fleet = make_fleet()
        ends = fleet.engines[0].spec.end_tokens()
        tokenizer = fleet.tokenizer
        if not isinstance(tokenizer, ModelTokenizer):
            return Check(part, True, f"no tokenizer; responses end with the tokens {list(ends)}", "")
        reading = tokenizer.reading
        names = [f"{token} {tokenizer.decode_all([token])!r}" for token in ends]
    except SeerError as error:
        finding, _, remedy = str(error).partition("; ")
        return Check(part, False, finding, remedy or "copy the model's files anew")
    templates = ", ".join(reading.templates) or "none"
    return Check(
        part,
        True,
        f"tokenizer {reading.kind}; responses end with {', '.join(names) or 'no token'}; chat templates:"
        f" {templates}",
        "",
    )
