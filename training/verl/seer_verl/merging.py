"""One answer of the answers to a response's chunks, in the fields of verl's ``TokenOutput``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["merged_experts", "merged_output"]

SUMS = ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")
"""Further fields that count, and add up over chunks."""


def merged_output(
    token_ids: Sequence[int], logprobs: Sequence[float], parts: Sequence[Mapping[str, Any]], *, stop: str
) -> dict[str, Any]:
    """Return the fields of the ``TokenOutput`` of a whole response.

    ``parts`` are those of the ``TokenOutput`` of each chunk that Seer has no use for: ``routed_experts``,
    ``num_preempted`` and ``extra_fields``.
    """
    fields: dict[str, Any] = {}
    for part in parts:
        more = part.get("extra_fields") or {}
        fields |= {name: value for name, value in more.items() if name not in SUMS}
        for name in SUMS:
            if more.get(name) is not None:
                fields[name] = fields.get(name, 0) + more[name]
    steps = [(part.get("extra_fields") or {}).get("global_steps") for part in parts]
    known = [each for each in steps if each is not None]
    fields["global_steps"] = steps[-1] if steps else None
    fields["min_global_steps"] = min(known, default=None)
    fields["max_global_steps"] = max(known, default=None)
    if parts:  # as verl has it: the hits of the prompt's own prefill
        fields["num_cached_tokens"] = (parts[0].get("extra_fields") or {}).get("num_cached_tokens")
    preempted = [part["num_preempted"] for part in parts if part.get("num_preempted") is not None]
    return {
        "token_ids": list(token_ids),
        "log_probs": list(logprobs),
        "routed_experts": merged_experts([part.get("routed_experts") for part in parts]),
        "stop_reason": stop,
        "num_preempted": sum(preempted) if preempted else None,
        "extra_fields": fields,
    }


def merged_experts(parts: Sequence[Any]) -> Any:
    """Return the experts of all tokens that ran through the model, a row for each, of arrays of chunks.

    A chunk's rows begin with the prompt's, and those of the first time stay: the tokens behind them were
    drawn with these.  Where a chunk has fewer rows than those before it, as where it brings those of its new
    tokens alone, they are its last ones.
    """
    found = None
    for part in parts:
        if part is None:
            continue
        if found is None:
            found = part
        else:
            import numpy

            new = part[len(found) :] if len(part) >= len(found) else part
            found = numpy.concatenate([found, new])
    return found
