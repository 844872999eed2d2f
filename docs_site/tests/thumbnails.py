"""Thumbnails of a page's parts, which show gross changes and forgive other fonts and line breaks.

Each section and each chart becomes a tile of so few pixels that letters are a shade.  A part that is drawn
elsewhere on the page has the same tile.
"""

import io

from PIL import Image, ImageChops, ImageStat

PARTS = "main > section, .chart"
PLACES = """(parts) => [...document.querySelectorAll(parts)]
    .map((part) => part.getBoundingClientRect())
    .filter((box) => box.width && box.height)
    .map((box) => [box.left + scrollX, box.top + scrollY, box.right + scrollX, box.bottom + scrollY])"""
WIDTH, HEIGHT = 24, 12
TOLERANCE = 0.75
"""The most that a tile may differ, in parts of its own contrast: another font makes 0.5, no content 1.1."""
LEAST_CONTRAST = 1.0


def thumbnails(tab):
    """Return the tiles of all visible parts, one below the other, once two looks agree."""
    before = None
    for _ in range(20):
        sheet = _draw(tab)
        if before is not None and sheet.tobytes() == before.tobytes():
            return sheet
        before = sheet
    raise AssertionError("the page goes on changing")


def changed_parts(sheet, stored):
    """Return sentences about the tiles that differ from the stored ones."""
    parts, wanted = sheet.height // HEIGHT, stored.height // HEIGHT
    if parts != wanted:
        return [f"the page has {parts} parts, and the stored picture {wanted}"]
    pairs = ((_tile(sheet, number), _tile(stored, number)) for number in range(parts))
    changes = [_change(*pair) for pair in pairs]
    return [
        f"part {number} has changed by {change:.2f}"
        for number, change in enumerate(changes)
        if change > TOLERANCE
    ]


def _draw(tab):
    page = Image.open(io.BytesIO(tab.screenshot(full_page=True))).convert("L")
    boxes = tab.evaluate(PLACES, PARTS)
    sheet = Image.new("L", (WIDTH, HEIGHT * len(boxes)))
    for number, box in enumerate(boxes):
        tile = page.resize((WIDTH, HEIGHT), Image.Resampling.BOX, box)
        sheet.paste(tile, (0, HEIGHT * number))
    return sheet


def _tile(sheet, number):
    return sheet.crop((0, HEIGHT * number, WIDTH, HEIGHT * (number + 1)))


def _change(tile, stored):
    difference = ImageStat.Stat(ImageChops.difference(tile, stored)).rms[0]
    return difference / max(ImageStat.Stat(stored).stddev[0], LEAST_CONTRAST)
