"""Damage to files, of each kind that disks, cut copies and other programs do to them."""

import random

__all__ = ["damage", "unlike"]

FLIPS = 6


def damages(content):
    """Yield names of damage, and a file's content with it; None for a file that is gone."""
    chance = random.Random(len(content))
    places = [0, len(content) // 2, len(content) - 1, *(chance.randrange(len(content)) for _ in range(FLIPS))]
    for place in places:
        flipped = bytearray(content)
        flipped[place] ^= 1 << chance.randrange(8)
        yield f"a bit flipped at {place}", bytes(flipped)
    for size in (0, 1, 9, len(content) // 2, len(content) - 1):
        yield f"cut at {size}", content[:size]
    yield "gone", None
    yield "one byte more", content + b"\0"
    for other in (b"{}", b"[]", b"null", b"\xff\xfe{", b"\0" * 64, chance.randbytes(100), b"[" * 100_000):
        yield f"replaced by {other[:9]!r}", other
    yield (
        "zeros in it",
        content[: len(content) // 3] + bytes(len(content) // 3) + content[len(content) // 3 :],
    )


def unlike(content):
    return [(what, damaged) for what, damaged in damages(content) if damaged != content]


def damage(file, content):
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
