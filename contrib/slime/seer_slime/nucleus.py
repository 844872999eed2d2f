"""The tokens from which slime's servers have drawn, which its trainer draws its own log-probs over.

With ``--rollout-top-p`` other than 1 slime's loss asks for them.  SGLang with slime's patch of it
(``docker/patch/latest/sglang-top_p.patch``) answers them to a request that asks as slime's own client does.
"""

from __future__ import annotations

import base64
import binascii
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from seer_core.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from seer_core import Completion

__all__ = ["ASKED", "FIELD", "NO_NUCLEUS", "nucleus_of", "wants_nucleus"]

FIELD = "sampling_params.custom_params"
"""The field of a request that asks; it holds for each token alone, so responses are divided under it."""
ASKED: Mapping[str, Any] = {"return_top_p_token_ids": True}
TOKENS, OFFSETS = "top_p_token_ids", "top_p_token_offsets"

NO_NUCLEUS = ConfigError(
    "--rollout-top-p: slime's servers do not answer the tokens from which they draw, which its loss needs;"
    " run them with slime's patch of SGLang (docker/patch/latest/sglang-top_p.patch), or sample at 1"
)


def wants_nucleus(args: Namespace, *, evaluation: bool) -> bool:
    """Return whether slime's own client asks for them."""
    return not evaluation and args.rollout_top_p != 1


def nucleus_of(completion: Completion) -> tuple[torch.Tensor, torch.Tensor]:
    """Return them for a response, joined over its chunks: int32 token ids, and offsets, one more than tokens.

    Those of token i are ``ids[offsets[i]:offsets[i + 1]]``.

    Raises:
        ConfigError: the servers do not answer them.
        EngineError: an answer is damaged.
    """
    ids, offsets = [_NONE], [torch.zeros(1, dtype=torch.int32)]
    for chunk in completion.chunks:
        found = [chunk.attachments.get(name) for name in (TOKENS, OFFSETS)]
        if None in found:
            raise NO_NUCLEUS
        tokens, ends = (_int32(each) for each in found)
        if len(ends) != chunk.tokens + 1 or ends[0] != 0 or ends[-1] != len(tokens):
            raise EngineError(
                f"response {completion.request_id!r}: {OFFSETS} of {len(ends)} numbers do not fit"
                f" {chunk.tokens} tokens and {len(tokens)} {TOKENS}"
            )
        ids.append(tokens)
        offsets.append(ends[1:] + offsets[-1][-1])
    return torch.cat(ids), torch.cat(offsets)


_NONE = torch.empty(0, dtype=torch.int32)


def _int32(text: Any) -> torch.Tensor:
    """Return numbers as a server writes them, in base64."""
    try:
        data = base64.b64decode(text, validate=True)
        return torch.frombuffer(bytearray(data), dtype=torch.int32) if data else _NONE
    except (TypeError, ValueError, binascii.Error) as error:
        raise EngineError(f"the tokens from which a server has drawn are damaged: {error}") from error
