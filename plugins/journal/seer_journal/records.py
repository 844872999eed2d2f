"""The records of a journal, and their form on disk.

A record is a frame: four bytes that mark its beginning, its length and its CRC-32 (both of four bytes,
little-endian), and the msgpack-encoded record.  The mark lets a reader go on behind a record that is damaged.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from seer_host.images import PlacedImages, PromptImage
from seer_host.json_files import UNREADABLE

from seer_core.model import PromptGroup, Sampling
from seer_core.model.arrays import Logprobs, PromptLogprobs, Tokens, TopLogprobs, packed, unpacked

__all__ = [
    "FORMAT",
    "Aborted",
    "Answered",
    "AnsweredImage",
    "Begun",
    "Damaged",
    "Opened",
    "Record",
    "WrittenChunk",
    "difference",
    "encode",
    "scan",
]

FORMAT = 1
"""Version of the form on disk; a reader takes its own alone."""

MARK = b"\xa5SJ\x01"
HEAD = struct.Struct("<4sII")


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """Begins each file."""

    format: int
    """The version of the form on disk."""
    run: str
    """The run's random id."""
    facts: dict[str, str]
    """The run's facts, by name: everything that its tokens depend on besides groups and weights."""


class Begun(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """A group was submitted."""

    group_id: str
    """The group's id."""
    prompt_token_ids: Tokens
    """The tokens of its prompt."""
    n: int
    """How many responses are wanted."""
    max_tokens: int
    """The most tokens of each response."""
    sampling: Sampling
    """How tokens are drawn."""
    seed: int
    """The group's seed."""
    version: int
    """The version of the weights."""
    fingerprints: dict[str, str]
    """The fingerprints of the weights, by their recipes."""
    turns: bool = False
    """Whether an environment answers the turns of its responses."""
    end_token_ids: tuple[int, ...] = ()
    """The tokens that end a response; none where they are not known."""
    attachments: str = ""
    """Stands for the prompt's fields for the engine; empty without any."""
    seeds: tuple[int, ...] = ()
    """The seed of each response; empty where they follow from the group's."""

    @classmethod
    def of(
        cls,
        group: PromptGroup,
        version: int,
        fingerprints: dict[str, str],
        end_token_ids: tuple[int, ...] = (),
    ) -> Begun:
        """Return the record of a group."""
        prompt = Tokens(group.prompt_token_ids)
        return cls(
            group.id,
            prompt,
            group.n,
            group.max_tokens,
            group.sampling,
            group.seed,
            version,
            fingerprints,
            group.turns,
            end_token_ids,
            _digest(group.attachments),
            group.seeds,
        )


def _digest(attachments: Mapping[str, Any]) -> str:
    """Return a digest of a prompt's fields for the engine, which may be images; empty without any."""
    if not attachments:
        return ""
    packed = msgspec.json.encode(attachments, order="deterministic")
    return hashlib.blake2b(packed, digest_size=8).hexdigest()


TITLES = {
    "prompt_token_ids": "prompt",
    "version": "weight version",
    "fingerprints": "weights' fingerprint",
    "turns": "answers by an environment",
    "end_token_ids": "tokens that end a response",
    "attachments": "digest of images or attachments",
    "seeds": "list of seeds",
}
"""How a user calls what is not called so in a prompts file."""


def difference(known: Begun, other: Begun) -> tuple[str, Any, Any] | None:
    """Return the first thing in which two groups of one id differ, so that their tokens may, and both values.

    Weights are compared by the fingerprints that both have, and where they have none in common by version;
    the tokens that end a response where both have some.
    """
    before, now = msgspec.structs.asdict(known), msgspec.structs.asdict(other)
    common = sorted(known.fingerprints.keys() & other.fingerprints.keys())
    for each in (before, now):
        each["fingerprints"] = {recipe: each["fingerprints"][recipe] for recipe in common}
        if common:
            each["version"] = 0
        if not (known.end_token_ids and other.end_token_ids):
            del each["end_token_ids"]
    for name, value in now.items():
        if before[name] != value:
            return TITLES.get(name, name), before[name], value
    return None


class WrittenChunk(msgspec.Struct, frozen=True, array_like=True, tag="c", gc=False):
    """A finished chunk of a response."""

    request_id: str
    """The request, as ``GROUP/INDEX``."""
    start: int
    """The position in the response at which the chunk begins."""
    token_ids: Tokens
    """The tokens that it brought."""
    logprobs: Logprobs
    """The log-prob of each of them."""
    stopped: bool
    """Whether the model ended the response."""
    account: tuple[Any, ...]
    """The values of a ``ChunkRecord``, in order."""
    top_logprobs: TopLogprobs | None = None
    """The most probable tokens at the place of each of them, where the prompt asks for them: how many, their
    ids and their log-probs.
    """
    prompt_logprobs: PromptLogprobs | None = None
    """The log-probs of the prompt, in its first chunk, where it asks for them."""


class AnsweredImage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An image of an answer: its tokens begin at ``offset`` from the prompt's first one."""

    digest: str
    width: int
    height: int
    offset: int
    length: int
    path: str
    """Its file; empty where ``data`` are the file's bytes."""
    data: bytes

    @classmethod
    def all_of(cls, images: PlacedImages) -> tuple[AnsweredImage, ...]:
        """Return the images of an answer."""
        return tuple(
            cls(
                image.digest,
                image.width,
                image.height,
                offset,
                length,
                "" if image.path is None else str(image.path),
                image.data or b"",
            )
            for image, offset, length in images.placed()
        )

    @property
    def image(self) -> PromptImage:
        """The image, whose file is looked at when it is needed."""
        path = Path(self.path) if self.path else None
        return PromptImage(self.digest, self.width, self.height, path, None if path else self.data)


class Answered(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """The environment of a response answered a turn."""

    request_id: str
    """The request, as ``GROUP/INDEX``."""
    start: int
    """The position in the response at which the answer begins."""
    token_ids: Tokens
    """The tokens of the answer."""
    turn: tuple[Any, ...]
    """The values of a ``TurnRecord``, in order."""
    done: bool
    """Whether the response is over with it."""
    images: tuple[AnsweredImage, ...] = ()
    """The images of the answer."""


class Aborted(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """The user aborted a response."""

    request_id: str
    """The request, as ``GROUP/INDEX``."""


Record = Opened | Begun | WrittenChunk | Answered | Aborted


class Damaged(msgspec.Struct, frozen=True):
    """Bytes of a file that are no record."""

    offset: int
    size: int


_encoder = msgspec.msgpack.Encoder(enc_hook=packed)
_decoder = msgspec.msgpack.Decoder(Record, dec_hook=unpacked)


def encode(record: Record) -> bytes:
    """Return a record's frame."""
    body = _encoder.encode(record)
    return HEAD.pack(MARK, len(body), zlib.crc32(body)) + body


def scan(data: bytes) -> Iterator[Record | Damaged]:
    """Yield what a file holds, in order: its records, and what stands between them."""
    position = 0
    while position < len(data):
        found = _record_at(data, position)
        if found is not None:
            record, position = found
            yield record
            continue
        bad, position = position, data.find(MARK, position + 1)
        while position >= 0 and _record_at(data, position) is None:
            position = data.find(MARK, position + 1)
        if position < 0:
            position = len(data)
        yield Damaged(bad, position - bad)


def _record_at(data: bytes, position: int) -> tuple[Record, int] | None:
    """Return the record that begins at a position, and where it ends; None if none does."""
    begin = position + HEAD.size
    if begin > len(data):
        return None
    mark, length, checksum = HEAD.unpack_from(data, position)
    end = begin + length
    if mark != MARK or end > len(data):
        return None
    body = memoryview(data)[begin:end]
    if zlib.crc32(body) != checksum:
        return None
    try:
        return _decoder.decode(body), end
    except UNREADABLE:
        return None
