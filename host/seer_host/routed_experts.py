"""Routed experts: which experts a mixture of experts chose for each token, as engines answer them.

A trainer that replays them takes the same experts as the rollout, where its own numerics would choose others
(routing replay, "R3": Ma et al. 2025, arXiv 2510.11370).  Seer's own engine answers those of the positions
that a chunk has computed; a server of SGLang's answers, with each chunk, those of all positions so far.
``routed_experts`` joins either over the chunks of a response.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from seer_core.errors import EngineError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from seer_core.model import Completion
    from seer_core.ports.engine import ChunkJob

__all__ = [
    "ROUTED_EXPERTS",
    "first_wanted",
    "packed",
    "routed_experts",
    "shortened",
    "unpacked",
    "whole_attachments",
]

ROUTED_EXPERTS = "routed_experts"
"""The attachment of a chunk that has them."""

NUMPY_FILE = b"\x93NUMPY"
"""Begins a file of NumPy's."""


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


def shortened(part: Mapping[str, Any], dropped: int) -> dict[str, Any]:
    """Return what ``packed`` has made, without its last ``dropped`` positions."""
    start, experts = unpacked(part)
    return packed(experts[: len(experts) - dropped], start)


def routed_experts(
    completion: Completion, prompt_tokens: int, experts_per_token: int | None = None
) -> NDArray[np.uint16] | None:
    """Return the experts of a response's tokens, uint16 [positions, layers, experts per token].

    Position p is that of token p of the prompt and the response behind it, in that order; the last token is
    not computed any more, and has none.  Where a position was computed more than once, the experts are those
    of the first time, with which the tokens after it were drawn.  None if the engine answers no experts.
    ``experts_per_token`` is wanted where they are of a server of SGLang's, which answers numbers without a
    shape.

    Raises:
        EngineError: a chunk lacks some, as after the end of another engine's answers, or their shape is not
            known.
    """
    positions = prompt_tokens + len(completion.token_ids) - 1
    joined = _joined(completion, positions)
    if joined is None:
        return None
    if len(joined) < positions:
        raise EngineError(
            f"response {completion.request_id!r} has routed experts of {len(joined)} positions in place of"
            f" {positions}; a chunk was answered without them"
        )
    joined = joined[:positions]
    if joined.ndim == 3:
        return joined
    if not experts_per_token or joined.shape[1] % experts_per_token:
        raise EngineError(
            f"a server answers {joined.shape[1]} routed experts for each token, those of all layers; give"
            " experts_per_token, as the model's config.json has it"
        )
    shaped: NDArray[np.uint16] = joined.reshape(positions, -1, experts_per_token)
    return shaped


def whole_attachments(completion: Completion, prompt_tokens: int | None = None) -> Mapping[str, Any]:
    """Return the attachments of a response's last chunk, with the experts of all positions.

    They have the form of the chunks' own.  What cannot be joined is as the last chunk has it, and so is what
    a server has answered where the prompt's length is not known.
    """
    if not completion.chunks:
        return {}
    last = completion.chunks[-1].attachments
    served = isinstance(last.get(ROUTED_EXPERTS), str)
    if ROUTED_EXPERTS not in last or len(completion.chunks) == 1 or (served and prompt_tokens is None):
        return last
    with suppress(EngineError):
        joined = _joined(completion, (prompt_tokens or 0) + len(completion.token_ids) - 1)
        if joined is not None:
            whole = _as_served(joined) if served else packed(joined, 0)
            return {**last, ROUTED_EXPERTS: whole}
    return last


def unpacked(part: Mapping[str, Any]) -> tuple[int, NDArray[np.uint16]]:
    """Return the first position of what ``packed`` has made, and the experts.

    Raises:
        EngineError: it is damaged.
    """
    try:
        start, shape, size = part["start"], part["shape"], part["bytes"]
        data = base64.b64decode(part["data"], validate=True)
        if size not in (1, 2) or start < 0 or len(shape) != 3 or len(data) != size * math.prod(shape):
            raise ValueError("sizes do not fit")
        return start, np.frombuffer(data, f"<u{size}").reshape(shape).astype(np.uint16)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise EngineError(f"routed experts are damaged: {error}") from error


def _joined(completion: Completion, positions: int) -> NDArray[np.uint16] | None:
    """Return the experts of the positions from the first on, up to one that no chunk has answered.

    They are [positions, layers, experts per token], or [positions, experts] of a server, whose last answer is
    about so many ``positions`` but those of an environment's tokens behind it.
    """
    values = [chunk.attachments.get(ROUTED_EXPERTS) for chunk in completion.chunks]
    own: list[tuple[int, NDArray[np.uint16]]] = [
        unpacked(each) for each in values if isinstance(each, Mapping)
    ]
    served = [_served(each) for each in values if isinstance(each, str)]
    if not own and served:
        if not isinstance(values[-1], str):
            raise EngineError(
                f"response {completion.request_id!r} has a server's routed experts of some chunks, and its"
                " last chunk was answered without them"
            )
        positions -= completion.turns[-1].answer_tokens if completion.turns else 0
        width, odd = divmod(len(served[-1]), positions)
        if odd or not width or any(len(each) % width for each in served):
            raise EngineError(
                f"a server answers {len(served[-1])} routed experts for {positions} positions of response"
                f" {completion.request_id!r}; they cannot be read"
            )
        own = [(0, each.reshape(-1, width)) for each in served]
    if not own:
        return None
    shape = own[0][1].shape[1:]
    parts, there = [np.empty((0, *shape), np.uint16)], 0
    for start, found in own:
        if start > there or found.shape[1:] != shape:
            break
        parts.append(found[there - start :])
        there += len(parts[-1])
    return np.concatenate(parts)


def _served(text: str) -> NDArray[np.uint16]:
    """Return the experts of all positions, one after the other, as servers of SGLang's write them."""
    try:
        data = base64.b64decode(text, validate=True)
        if data.startswith(NUMPY_FILE):
            raise EngineError(
                "routed experts are a file of NumPy's, as servers of vLLM answer them; read that of the last"
                " chunk, which is about all positions"
            )
        return np.frombuffer(data, "<i4").astype(np.uint16)
    except (ValueError, binascii.Error) as error:
        raise EngineError(f"routed experts are damaged: {error}") from error


def _as_served(experts: NDArray[np.uint16]) -> str:
    return base64.b64encode(experts.astype("<i4").tobytes()).decode()
