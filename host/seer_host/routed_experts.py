"""Routed experts: which experts a mixture of experts chose for each token, as engines answer them.

A trainer that replays them takes the same experts as the rollout, where its own numerics would choose others
(routing replay, "R3": Ma et al. 2025, arXiv 2510.11370).  An engine answers those of the positions that a
chunk has computed; ``routed_experts`` joins them over the chunks of a response.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from seer_core.errors import EngineError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from seer_core.model import Completion
    from seer_core.ports.engine import ChunkJob

__all__ = ["ROUTED_EXPERTS", "first_wanted", "packed", "routed_experts"]

ROUTED_EXPERTS = "routed_experts"
"""The attachment of a chunk that has them."""


def first_wanted(job: ChunkJob) -> int:
    """Return the first position of a job's context whose experts its chunk has to answer.

    The chunks before it have answered those of all positions that they computed: all but their last token's.
    The first chunk of a response answers those of its prompt, and the first of a turn begins anew, since the
    answer of an environment may be of any length.
    """
    begins = len(job.token_ids) == job.context_tokens
    return 0 if begins else len(job.token_ids) - 1


def packed(experts: NDArray[np.integer[Any]], start: int) -> dict[str, Any]:
    """Return experts, int [positions, layers, experts per token], from position ``start`` on, as a value
    of JSON: their numbers in as few bytes as the largest needs, in base64.
    """
    small = np.uint8 if experts.max(initial=0) < 256 else np.uint16
    data = np.ascontiguousarray(experts, dtype=np.dtype(small).newbyteorder("<"))
    return {
        "start": start,
        "shape": list(experts.shape),
        "bytes": data.itemsize,
        "data": base64.b64encode(data.tobytes()).decode(),
    }


def routed_experts(completion: Completion, prompt_tokens: int) -> NDArray[np.uint16] | None:
    """Return the experts of a response's tokens, uint16 [positions, layers, experts per token].

    Position p is that of token p of the prompt and the response behind it, in that order; the last token is
    not computed any more, and has none.  Where a position was computed more than once, the experts are those
    of the first time, with which the tokens after it were drawn.  None if the engine answers no experts.

    Raises:
        EngineError: a chunk lacks some, as after the end of another engine's answers.
    """
    parts = [chunk.attachments[ROUTED_EXPERTS] for chunk in completion.chunks if _has_them(chunk.attachments)]
    if not parts:
        return None
    positions = prompt_tokens + len(completion.token_ids) - 1
    joined: NDArray[np.uint16] | None = None
    there = 0
    for part in parts:
        start, found = _unpacked(part, completion.request_id)
        if joined is None:
            joined = np.empty((positions, *found.shape[1:]), np.uint16)
        end = min(start + len(found), positions)
        if start > there or found.shape[1:] != joined.shape[1:]:
            break
        if end > there:
            joined[there:end] = found[there - start : end - start]
            there = end
    if joined is None or there < positions:
        raise EngineError(
            f"response {completion.request_id!r} has routed experts of {there} positions in place of"
            f" {positions}; a chunk was answered without them"
        )
    return joined


def _has_them(attachments: Mapping[str, Any]) -> bool:
    return isinstance(attachments.get(ROUTED_EXPERTS), dict)


def _unpacked(part: Mapping[str, Any], request_id: str) -> tuple[int, NDArray[np.uint16]]:
    """Return the first position of what ``packed`` has made, and the experts."""
    try:
        start, shape, size = part["start"], part["shape"], part["bytes"]
        data = base64.b64decode(part["data"], validate=True)
        if size not in (1, 2) or start < 0 or len(shape) != 3 or len(data) != size * math.prod(shape):
            raise ValueError("sizes do not fit")
        return start, np.frombuffer(data, f"<u{size}").reshape(shape).astype(np.uint16)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise EngineError(f"the routed experts of response {request_id!r} are damaged: {error}") from error
