"""Rollouts that slime writes by ``--save-debug-rollout-data``: one file of PyTorch's per rollout.

slime 0.3.1, ``save_debug_rollout_data`` of slime/observability/rollout_data_utils.py, and ``Sample.to_dict``
of slime/utils/types.py.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from pickle import UnpicklingError
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from seer_host.json_files import describe_flaw

from seer_core.errors import ConfigError, InputError, quote
from seer_lab.foreign.memory import limited_memory
from seer_lab.foreign.responses import LoggedResponse
from seer_lab.lengths import LONGEST, RecordedTurn, Tokens

__all__ = ["KIND", "recognises", "responses"]

KIND = "a rollout dump of slime's"

ARCHIVE = b"PK\x03\x04"
"""How a file of PyTorch's begins."""

FINISHED = ("completed", "truncated")

ENFORCED = re.compile(r"^\[enforce fail at [^\]]*\] \. ")
"""The place in its own source that PyTorch writes before a reason."""

GUIDE = "docs/guides/your-own-logs.md"


BASE_BYTES = 1 << 30
BYTES_PER_PICKLED = 64
"""Memory that reading a dump may take: a GiB, its size, and so much for each byte of its pickle.

Small integers take up to 20 times as much in a list of Python's, and empty dictionaries 40 times.
"""


MOST_PARTS = 100_000
"""Texts, numbers, lists and mappings of a prompt."""


class _Status(msgspec.Struct, frozen=True):
    """Whether a sample has finished, which comes before anything else of it."""

    status: str


class _Sample(msgspec.Struct, frozen=True):
    """A response, with the number of its tokens, prompt and all, in place of the tokens."""

    tokens: Tokens
    response_length: Annotated[int, Meta(ge=0, le=LONGEST)]
    group_index: int | None = None
    loss_mask: list[bool | int | float] | None = None


class _Dump(msgspec.Struct, frozen=True):
    rollout_id: int
    samples: list[Any]


def recognises(head: bytes) -> bool:
    """Return whether a file that begins so may be such a dump."""
    return head.startswith(ARCHIVE)


def responses(path: Path, count: Callable[[str], int]) -> Iterator[LoggedResponse]:
    """Yield the responses of a file, whose texts need no ``count``.

    Raises:
        ConfigError: PyTorch is not installed.
        InputError: the file is something else, holds objects that could run code, or would take much more
            memory than it is large.
    """
    _import_torch(path)
    size, pickled = _check_archive(path)
    allowed = BASE_BYTES + 2 * size + BYTES_PER_PICKLED * pickled
    try:
        with limited_memory(allowed):
            found = list(_read(path))
    except MemoryError as error:
        raise InputError(
            f"{path} takes more than {allowed >> 20:,} MiB to read, and has {size / 2**20:,.1f} itself; it is"
            f" damaged, or made to fill the memory. Convert it where slime runs, as {GUIDE} shows"
        ) from error
    yield from found


def _read(path: Path) -> Iterator[LoggedResponse]:
    loaded = _load(path)
    try:
        _check_mapping(loaded)
        dump = msgspec.convert(loaded, _Dump)
    except ValueError as error:  # msgspec's errors are ValueErrors
        raise InputError(f"{path} is not {KIND}: {describe_flaw(error)}; name another file") from error
    for number, fields in enumerate(dump.samples):
        try:
            _check_mapping(fields)
            response = _response(dump.rollout_id, fields)
        except (ValueError, TypeError, RuntimeError) as error:  # msgspec's errors are ValueErrors
            raise InputError(
                f"{path} is not {KIND}: samples[{number}]: {describe_flaw(error)}; name another file"
            ) from error
        if response.is_finished and response.prompt_tokens < 1:
            raise InputError(
                f"{path}: samples[{number}] has {response.prompt_tokens + response.output_tokens} tokens, of"
                f" which {response.output_tokens} are its response, so it has no prompt; name another file"
            )
        yield response


def _response(iteration: int, fields: Mapping[str, Any]) -> LoggedResponse:
    """Return a sample; nothing of one that has not finished is looked at."""
    status, length = msgspec.convert(fields, _Status).status, fields.get("response_length")
    if status not in FINISHED or (type(length) is int and length == 0):
        return LoggedResponse(iteration, None, 0, 0, is_finished=False)
    tokens = fields.get("tokens", ())
    if not hasattr(tokens, "__len__"):
        raise ValueError(f"tokens: expected a list, got `{type(tokens).__name__}`")
    sample = msgspec.convert({**fields, "tokens": len(tokens)}, _Sample)
    before, turns = _turns(sample)
    prompt_tokens = sample.tokens - sample.response_length + before
    group = _key_of(fields.get("prompt")) if sample.group_index is None else sample.group_index
    return LoggedResponse(iteration, group, prompt_tokens, sample.response_length - before, turns=turns)


def _check_mapping(value: object) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"expected a dictionary, got `{type(value).__name__}`")
    if not all(isinstance(key, str) for key in value):
        raise ValueError("a key of it: expected `str`")


def _key_of(prompt: object) -> str:
    """Return a text that is the same for equal prompts; one of a chat is a list of messages."""
    left, parts = [prompt], 0
    while left:
        part = left.pop()
        parts += 1
        if parts > MOST_PARTS:  # a list that holds itself, or holds another list many times
            raise ValueError(f"its prompt has more than {MOST_PARTS:,} parts")
        left += part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else ()
    return str(prompt)


def _turns(sample: _Sample) -> tuple[int, tuple[RecordedTurn, ...]]:
    """Return how many tokens of a response stood there before its first turn, and its turns.

    Tokens whose mask is 0 are a tool's, or those of an earlier rollout if they come first.  A mask of zeros
    alone leaves the whole response out of the loss, and names no tool.
    """
    mask, tokens = sample.loss_mask, sample.response_length
    if mask is None or not any(mask):
        return 0, (RecordedTurn(tokens, None, 0),)
    if len(mask) != tokens:
        raise ValueError(f"loss_mask has {len(mask)} entries for {tokens} tokens")
    runs = [(is_model, sum(1 for _ in run)) for is_model, run in groupby(mask, bool)]
    before = 0 if runs[0][0] else runs.pop(0)[1]
    written = [length for is_model, length in runs if is_model]
    answered = [length for is_model, length in runs if not is_model]
    answered += [0] * (len(written) - len(answered))
    turns = zip(written, answered, strict=True)
    return before, tuple(RecordedTurn(model, 0.0 if tool else None, tool) for model, tool in turns)


def _import_torch(path: Path) -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{path}: reading {KIND} needs PyTorch ({error}); run `pip install torch`, or convert the file"
            f" where slime runs, as {GUIDE} shows"
        ) from error


def _check_archive(path: Path) -> tuple[int, int]:
    """Return the bytes of a file and of the pickle in it, if all that it holds lies in it as it is.

    PyTorch compresses nothing.  A file that does could be a thousand times as large once it is read.
    """
    try:
        size = path.stat().st_size
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except Exception as error:  # zipfile raises many kinds
        raise InputError(
            f"{path} is not {KIND}, or is damaged: {describe_flaw(error)}; name another file"
        ) from error
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise InputError(
                f"{path} is not {KIND}: {quote(entry.filename)} in it is compressed, from"
                f" {entry.file_size:,} bytes, and PyTorch compresses nothing; name another file"
            )
    if not any(entry.filename.endswith("/data.pkl") for entry in entries):
        raise InputError(
            f"{path} is not {KIND}: it is a zip archive without PyTorch's data.pkl; name another file"
        )
    if (held := sum(entry.file_size for entry in entries)) > size:
        raise InputError(
            f"{path} is not {KIND}: its parts have {held:,} bytes, and the file {size:,}; name another file"
        )
    return size, sum(entry.file_size for entry in entries if entry.filename.endswith(".pkl"))


def _load(path: Path) -> Mapping[str, Any]:
    """Return what a file holds, without the data of its tensors; nothing in it can run."""
    import torch

    try:
        loaded: Mapping[str, Any] = torch.load(path, map_location="meta", weights_only=True)
    except UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = quote(found[1]) if found else "objects of other kinds"
        raise InputError(
            f"{path} holds {what} beside numbers, texts and tensors, and loading that could run code; convert"
            f" it where slime runs, as {GUIDE} shows"
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # PyTorch raises many kinds
        flaw = ENFORCED.sub("", describe_flaw(error))
        raise InputError(f"{path} is not {KIND}, or is damaged: {flaw}; name another file") from error
    return loaded
