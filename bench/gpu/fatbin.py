"""GPU code in a library, of which one GPU's is kept alone: the rest becomes zeros, which pack to nothing.

nvcc puts code into containers: a head of 16 bytes, and then entries, each with a head that names the kind (1:
PTX, 2: machine code), the size and the architecture.  A driver picks the entry of its GPU by these heads, so
the others' contents are never read.  PTX stays where a container has no machine code for the GPU.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

__all__ = ["Entry", "containers", "kept_for", "of_heads"]

MAGIC = struct.pack("<I", 0xBA55ED50)
HEAD = struct.Struct("<IHHQ")
ENTRY = struct.Struct("<HHIQIIHHI")
PTX, MACHINE = 1, 2
VALUE_HEAD = re.compile(rb"EEELi(\d+)ENS_10bfloat16_t")
"""In the name of one of FlashAttention-3's kernels: the size of a head's values."""


class Entry(NamedTuple):
    """A piece of GPU code: where its content is, its kind, and its architecture, such as 90."""

    start: int
    size: int
    kind: int
    architecture: int


def containers(library: bytes) -> Iterator[list[Entry]]:
    """Yield the entries of each container of a library."""
    at = library.find(MAGIC)
    while at >= 0:
        _, version, head, size = HEAD.unpack_from(library, at)
        end = at + head + size
        if (version, head) != (1, HEAD.size) or end > len(library):
            at = library.find(MAGIC, at + 4)
            continue
        entries, place = [], at + head
        while place + ENTRY.size <= end:
            kind, _, own_head, length, *_, architecture = ENTRY.unpack_from(library, place)
            entries.append(Entry(place + own_head, length, kind, architecture))
            place += own_head + length
        yield entries
        at = library.find(MAGIC, end)


def kept_for(library: bytes, architecture: int, wanted: Callable[[bytes], bool] = lambda code: True) -> bytes:
    """Return the library with zeros for code of other architectures, and for machine code not ``wanted``."""
    trimmed = bytearray(library)
    for entries in containers(library):
        own = [each for each in entries if (each.kind, each.architecture) == (MACHINE, architecture)]
        for each in entries:
            kept = each in own or (each.kind == PTX and not own and each.architecture <= architecture)
            if kept and each.kind == MACHINE:
                kept = wanted(library[each.start : each.start + each.size])
            if not kept:
                trimmed[each.start : each.start + each.size] = bytes(each.size)
    return bytes(trimmed)


def of_heads(size: int) -> Callable[[bytes], bool]:
    """Return whether code of FlashAttention-3 is for heads whose values have this size, or for all."""

    def wanted(code: bytes) -> bool:
        at = code.find(b"CollectiveMainloopFwd")
        named = VALUE_HEAD.search(code, at, at + 400) if at >= 0 else None
        return at < 0 or (named is not None and int(named[1]) == size)

    return wanted
