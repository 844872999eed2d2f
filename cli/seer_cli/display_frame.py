"""A frame of the display: lines that fit a terminal; and the same facts as one line, for a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
from rich.cells import cell_len, chop_cells
from rich.text import Text

from seer_cli.progress import InstanceLine, RunProgress
from seer_cli.request_wording import counted, lacking
from seer_core.errors import printable

__all__ = ["frame_of", "headline", "line_of", "standing"]

SHOWN_ID = 60
"""Characters shown of an id or of a title."""
SHOWN_MISSING = 160
"""Characters shown of the reason why an instance that is down waits."""
NAMED = 4
"""The most instances that one line of a file names."""
BAR = 60
"""The most columns of the bar of responses."""
KV_BAR = 12
LEAST_ID = 8
"""The fewest columns of an instance's id."""
OPTIONAL = ("bar", "node", "drafting")
"""Columns that a narrow terminal does without, the first to go first."""
SCARCE = ("queued", "reserved", "running")
"""Columns that go too once ids are as short as they may be."""


def headline(title: str, progress: RunProgress, left_s: float | None) -> list[str]:
    """Return the figures of the whole rollout, each with its name."""
    length = progress.acceptance_length
    return [
        f"{printable(title, SHOWN_ID)}: groups {progress.groups_done}/{progress.groups}",
        f"requests {progress.requests_done}/{progress.requests}",
        f"tokens {progress.tokens:,}",
        f"{progress.tokens_per_s:,.0f} tok/s",
        *([] if length is None else [f"{length:.2f} tok/step"]),
        *([f"TROUBLES {progress.degradations}"] if progress.degradations else []),
        f"left {duration(left_s)}",
    ]


def standing(progress: RunProgress) -> list[str]:
    """Return the tail, if it has begun, and how many requests wait for what, in words."""
    return [" ".join(parts) for parts in (_tail(progress), _waiting(progress)) if parts]


def line_of(title: str, progress: RunProgress, left_s: float | None) -> str:
    """Return all on one line; of many instances the sums, and those that are down or fullest."""
    lines = list(progress.instances.values())
    notes = []
    if len(lines) > NAMED:
        alive = [line for line in lines if line.alive]
        some = "" if len(alive) == len(lines) else f"{len(alive)} of "
        notes.append(f"{some}{counted(len(lines), 'instance')}: {_sums(alive)}")
        lines = _worst_first(lines)[:NAMED]
    notes += [f"{_name(line)}{': ' + _sums([line]) if line.alive else ' ' + _fate(line)}" for line in lines]
    return "  ".join([*headline(title, progress, left_s), *standing(progress), *notes])


def frame_of(
    title: str, progress: RunProgress, left_s: float | None, width: int, height: int, ascii_only: bool = False
) -> list[Text]:
    """Return the lines of a terminal with so many columns and rows: no more lines, and none is wider."""
    lines = [Text(each, "bold") for each in _flow(headline(title, progress, left_s), width, "  ")]
    lines.append(_bar(min(width, BAR), [progress.requests_done / max(1, progress.requests)], ascii_only))
    lines += [Text(each, "yellow") for each in _flow(_tail(progress), width)]
    lines += [Text(each) for each in _flow(_waiting(progress), width)]
    lines += _instances(list(progress.instances.values()), width, height - len(lines), ascii_only)
    for line in lines:
        line.truncate(width, overflow="crop")
    return lines[:height]


def duration(seconds: float | None) -> str:
    """Return a time as minutes and seconds; as hours too where there are any."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _tail(progress: RunProgress) -> list[str]:
    tail = progress.tail
    if tail is None:
        return []
    last = "the last" if tail.left == 1 else f"the last {tail.left:,}"
    return [
        f"tail: {last} of {tail.requests:,} responses,",
        f"for {duration(tail.for_s)} so far,",
        f"the longest about {tail.longest_tokens:,} tokens",
        *([f"({printable(tail.longest_id, SHOWN_ID)})"] if tail.longest_id else []),
    ]


def _waiting(progress: RunProgress) -> list[str]:
    counts = progress.waiting
    if not counts:
        return []
    total = f" {sum(counts.values()):,}" if len(counts) > 1 else ""
    return [f"waiting{total}:", lacking(counts)]


def _flow(pieces: Sequence[str], width: int, gap: str = " ") -> list[str]:
    """Return pieces on lines of this width, each whole where it can be, otherwise word by word."""
    lines: list[str] = []
    for piece in pieces:
        words = [piece] if cell_len(piece) <= width else piece.split(" ")
        for number, word in enumerate(words):
            more = (" " if number else gap) + word
            if lines and cell_len(lines[-1] + more) <= width:
                lines[-1] += more
            else:
                lines.append(_shortened(word, width))
    return lines


def _shortened(text: str, width: int) -> str:
    """Return a text in so many columns, without its middle where it is longer."""
    if cell_len(text) <= width:
        return text
    head = (width - 1) // 2
    first, last = chop_cells(text, max(1, head))[0], chop_cells(text[::-1], max(1, width - 1 - head))[0]
    return f"{first}…{last[::-1]}"


def _bar(width: int, shares: Iterable[float], ascii_only: bool) -> Text:
    """Return a bar with a share of it in each of up to two shades, the darkest first; shares are from 0."""
    shades = "#=." if ascii_only else "█▒░"
    bar, filled = Text(), 0
    for shade, style, share in zip(shades, ("green", "yellow"), shares, strict=False):
        upto = round(width * min(1.0, share))
        bar.append(shade * max(0, upto - filled), style)
        filled = max(filled, upto)
    return bar.append(shades[-1] * (width - filled), "bright_black")


def _instances(lines: Sequence[InstanceLine], width: int, height: int, ascii_only: bool) -> list[Text]:
    """Return as many instances as there is room for, those that are down first, and the sums of the rest."""
    down = {
        line.id: _flow([f"{_name(line)} ", *_fate(line).split()], width) for line in lines if not line.alive
    }
    rows_of_all = sum(map(len, down.values())) + (len(lines) - len(down)) + (len(down) < len(lines))
    shown = list(lines)
    if rows_of_all > height:
        shown, room = [], height - 2  # the titles of the columns, and the sums of the rest
        for line in _worst_first(lines):
            room -= len(down.get(line.id, " "))
            if room < 0:
                break
            shown.append(line)
    found = [Text(each, "red") for line in shown for each in down.get(line.id, ())]
    names = {line.id for line in shown if line.alive}
    found += _table([line for line in lines if line.id in names], width, ascii_only)
    rest = [line for line in lines if line not in shown]
    if rest:
        found += [Text(each.rstrip(",")) for each in _flow(_more(rest, bool(shown)), width)[:1]]
    return found


@attrs.frozen
class _Column:
    name: str
    title: str
    cells: Sequence[Text]
    is_text: bool = False

    @property
    def width(self) -> int:
        return max(cell_len(self.title), *(each.cell_len for each in self.cells))


def _table(lines: Sequence[InstanceLine], width: int, ascii_only: bool) -> list[Text]:
    """Return a row for each instance that is up below the titles of the columns, of which as many as fit."""
    if not lines:
        return []
    columns, gap = _fitting(_columns(lines, ascii_only), width)
    id_width = width - sum(gap + column.width for column in columns[1:])
    names = [Text(_shortened(each.plain, max(1, id_width))) for each in columns[0].cells]
    columns = [attrs.evolve(columns[0], cells=names), *columns[1:]]
    rows = [[Text(column.title, "bright_black") for column in columns]]
    rows += [[column.cells[number] for column in columns] for number in range(len(lines))]
    found = []
    for row in rows:
        text = Text()
        for column, cell in zip(columns, row, strict=True):
            space = " " * (column.width - cell.cell_len)
            text.append(" " * (gap if text else 0) + ("" if column.is_text else space))
            text.append_text(cell).append(space if column.is_text else "")
        text.rstrip()
        found.append(text)
    return found


def _columns(lines: Sequence[InstanceLine], ascii_only: bool) -> list[_Column]:
    def cells(texts: Iterable[str]) -> list[Text]:
        return [Text(each) for each in texts]

    bars = [_bar(KV_BAR, (line.kv_usage, line.kv_reserved), ascii_only) for line in lines]
    columns = [
        _Column("id", "instance", cells(map(_name, lines)), is_text=True),
        _Column("bar", "KV", bars, is_text=True),
        _Column("used", "KV used", cells(f"{line.kv_usage:.0%}" for line in lines)),
        _Column("reserved", "reserved", cells(f"{line.kv_reserved:.0%}" for line in lines)),
        _Column("running", "running", cells(f"{line.running}/{line.max_running}" for line in lines)),
        _Column("queued", "queued", cells(f"{line.waiting}" for line in lines)),
    ]
    if any(line.drafting_s for line in lines):
        shares = (f"{line.drafting_s / line.stepping_s:.1%}" if line.drafting_s else "" for line in lines)
        columns.append(_Column("drafting", "drafting", cells(shares)))
    if len({line.node for line in lines}) > 1:
        nodes = cells(printable(line.node, SHOWN_ID) for line in lines)
        columns.append(_Column("node", "node", nodes, is_text=True))
    return columns


def _fitting(columns: list[_Column], width: int) -> tuple[list[_Column], int]:
    """Return the columns that fit, and how far apart they stand; the first may have to be shortened."""
    whole, least = columns[0].width, min(columns[0].width, LEAST_ID)
    tries = [(OPTIONAL[:count], whole) for count in range(len(OPTIONAL) + 1)]
    tries += [((*OPTIONAL, *SCARCE[:count]), least) for count in range(len(SCARCE) + 1)]
    for dropped, id_width in tries:
        kept = [each for each in columns if each.name not in dropped]
        others = sum(each.width for each in kept[1:])
        for gap in (2, 1):
            if id_width + others + gap * (len(kept) - 1) <= width:
                return kept, gap
    return columns[:1], 1


def _worst_first(lines: Sequence[InstanceLine]) -> list[InstanceLine]:
    """Return those that are down, and then the others, the fullest first."""
    return sorted(lines, key=lambda line: (line.alive, -max(line.kv_usage, line.kv_reserved)))


def _more(rest: Sequence[InstanceLine], are_others_shown: bool) -> list[str]:
    alive = [line for line in rest if line.alive]
    more = f"and {len(rest):,} more:" if are_others_shown else f"{counted(len(rest), 'instance')}:"
    dead = [f"{len(rest) - len(alive):,} down,"] if len(alive) < len(rest) else []
    return [more, *dead, *(f"{each}," for each in _figures(alive))]


def _sums(lines: Sequence[InstanceLine]) -> str:
    return ", ".join(_figures(lines))


def _figures(lines: Sequence[InstanceLine]) -> list[str]:
    """Return the mean KV of instances that are up, and the sums of their requests."""
    if not lines:
        return ["none is up"]
    used = sum(line.kv_usage for line in lines) / len(lines)
    reserved = sum(line.kv_reserved for line in lines) / len(lines)
    return [
        f"KV {used:.0%} used",
        f"{reserved:.0%} reserved",
        f"running {sum(line.running for line in lines):,}/{sum(line.max_running for line in lines):,}",
        f"queued {sum(line.waiting for line in lines):,}",
    ]


def _name(line: InstanceLine) -> str:
    return printable(line.id, SHOWN_ID)


def _fate(line: InstanceLine) -> str:
    if line.failed:
        return "given up"
    return f"waits: {printable(line.missing, SHOWN_MISSING)}" if line.missing else "lost, restarting"
