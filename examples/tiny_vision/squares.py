"""Count the coloured squares of an image: its pictures, the careless teacher, the prompts and the reward.

A picture has three rows of three places, and a square of some colour in some of them.  The response names the
squares, row by row, and then says how many they are:

    red blue / / yellow = 3

The reward looks at the number alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from io import BytesIO
from typing import TYPE_CHECKING

from PIL import Image

if TYPE_CHECKING:
    from seer_rl import Response

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 215, 50),
    "purple": (150, 50, 190),
    "orange": (240, 140, 30),
}
PLACES = 3
"""In a row, and rows."""
PLACE_PIXELS = 8
OVERLOOKED = 0.12
"""The share of squares that the teacher does not see."""
RESPONSES = 8
MAX_TOKENS = 24
QUESTION = "how many squares ?"

Rows = list[list[str]]
"""The colour in each place; empty where there is no square."""


def make_rows(rng: random.Random) -> Rows:
    """Draw which places have squares; some pictures are nearly empty, others nearly full."""
    share = rng.uniform(0.2, 0.9)
    names = [*COLOURS]
    return [[rng.choice(names) if rng.random() < share else "" for _ in range(PLACES)] for _ in range(PLACES)]


def count(rows: Rows) -> int:
    """Return the number of squares."""
    return sum(bool(colour) for row in rows for colour in row)


def draw(rows: Rows, rng: random.Random) -> Image.Image:
    """Draw squares of four to six pixels, anywhere in their places, before a grainy grey."""
    side, grey = PLACES * PLACE_PIXELS, rng.randrange(60, 200)
    image = Image.new("RGB", (side, side))
    image.putdata([(grey + rng.randrange(-12, 13),) * 3 for _ in range(side * side)])
    for y, row in enumerate(rows):
        for x, colour in enumerate(row):
            if colour:
                size = rng.randrange(4, 7)
                left = x * PLACE_PIXELS + rng.randrange(PLACE_PIXELS - size + 1)
                top = y * PLACE_PIXELS + rng.randrange(PLACE_PIXELS - size + 1)
                image.paste(COLOURS[colour], (left, top, left + size, top + size))
    return image


def write_response(rows: Rows, rng: random.Random) -> str:
    """Return what the teacher writes, who overlooks some squares and counts those that it has named."""
    named = [[each for each in row if each and rng.random() >= OVERLOOKED] for row in rows]
    return " / ".join(" ".join(row) for row in named).replace("  ", " ") + f" = {sum(map(len, named))}"


def prompts(iteration: int, groups: int, seed: int) -> Iterator[Mapping[str, object]]:
    """Yield fresh pictures for each iteration."""
    rng = random.Random(f"tiny-vision {seed} {iteration}")
    for index in range(groups):
        rows = make_rows(rng)
        file = BytesIO()
        draw(rows, rng).save(file, "PNG")
        content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
        yield {
            "group_id": f"{iteration}-{index}",
            "messages": [{"role": "user", "content": content}],
            "images": [file.getvalue()],
            "n": RESPONSES,
            "max_tokens": MAX_TOKENS,
            "metadata": {"answer": count(rows)},
        }


def held_out(iteration: int, groups: int, seed: int) -> Iterator[Mapping[str, object]]:
    """Yield pictures that are the same in every run; training meets none of them but by chance."""
    return prompts(-1, groups, 0)


def reward(response: Response) -> float:
    """Return 1 if the response ends in the number of squares, else 0."""
    _, found, answer = (response.text or "").rpartition("=")
    return float(bool(found) and answer.replace(" ", "") == str(response.metadata["answer"]))
