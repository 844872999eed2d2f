"""Rollouts that slime writes by ``--save-debug-rollout-data``: one file of PyTorch's per rollout.

slime 0.3.1, ``save_debug_rollout_data`` of slime/observability/rollout_data_utils.py, and ``Sample.to_dict``
of slime/utils/types.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from seer_core.errors import ConfigError, InputError, quote
from seer_core.json_files import describe_flaw
from seer_lab.foreign.responses import LoggedResponse
from seer_lab.lengths import LONGEST, Tokens

__all__ = ["KIND", "recognises", "responses"]

KIND = "a rollout dump of slime's"

ARCHIVE = b"PK\x03\x04"
"""How a file of PyTorch's begins."""

FINISHED = ("completed", "truncated")

GUIDE = "docs/guides/your-own-logs.md"


class _Sample(msgspec.Struct, frozen=True):
    """A response, with the number of its tokens, prompt and all, in place of the tokens."""

    tokens: Tokens
    response_length: Annotated[int, Meta(ge=0, le=LONGEST)]
    status: str
    group_index: int | None = None


class _Dump(msgspec.Struct, frozen=True):
    rollout_id: int
    samples: list[dict[str, Any]]


def recognises(head: bytes) -> bool:
    """Return whether a file that begins so may be such a dump."""
    return head.startswith(ARCHIVE)


def responses(path: Path, count: Callable[[str], int]) -> Iterator[LoggedResponse]:
    """Yield the responses of a file, whose texts need no ``count``.

    Raises:
        ConfigError: PyTorch is not installed.
        InputError: the file is something else, or holds objects that could run code.
    """
    try:
        dump = msgspec.convert(_load(path), _Dump)
    except msgspec.ValidationError as error:
        raise InputError(f"{path} is not {KIND}: {describe_flaw(error)}; name another file") from error
    for number, fields in enumerate(dump.samples):
        try:
            sample = msgspec.convert({**fields, "tokens": len(fields.get("tokens", ()))}, _Sample)
        except (msgspec.ValidationError, TypeError) as error:
            raise InputError(
                f"{path} is not {KIND}: samples[{number}]: {describe_flaw(error)}; name another file"
            ) from error
        prompt_tokens = sample.tokens - sample.response_length
        if prompt_tokens < 1:
            raise InputError(
                f"{path}: samples[{number}] has {sample.tokens} tokens, of which {sample.response_length} are"
                " its response, so it has no prompt; name another file"
            )
        group = str(fields.get("prompt")) if sample.group_index is None else sample.group_index
        is_finished = sample.status in FINISHED and sample.response_length > 0
        yield LoggedResponse(dump.rollout_id, group, prompt_tokens, sample.response_length, is_finished)


def _load(path: Path) -> Mapping[str, Any]:
    """Return what a file holds, without the data of its tensors; nothing in it can run."""
    try:
        import torch
    except ImportError as error:
        raise ConfigError(
            f"{path}: reading {KIND} needs PyTorch ({error}); run `pip install torch`, or convert the file"
            f" where slime runs, as {GUIDE} shows"
        ) from error
    try:
        loaded: Mapping[str, Any] = torch.load(path, map_location="meta", weights_only=True)
    except UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = quote(found[1]) if found else "objects of other kinds"
        raise InputError(
            f"{path} holds {what} beside numbers, texts and tensors, and loading that could run code; convert"
            f" it where slime runs, as {GUIDE} shows"
        ) from error
    except Exception as error:  # PyTorch raises many kinds
        raise InputError(
            f"{path} is not {KIND}, or is damaged: {describe_flaw(error)}; name another file"
        ) from error
    return loaded
