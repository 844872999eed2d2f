"""The page docs/results/reproduction.md: generated tables in a hand-written text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from seer_cli.output import replacing

from seer_lab.paper.show import Outcome, markdown_of, summary_of

__all__ = ["write_report"]

TEMPLATE = "page.md"
PLACE = re.compile(r"\{([a-z-]+)\}")


def write_report(path: Path, outcomes: Sequence[Outcome], seeds: int, command: str) -> None:
    """Fill the places of the template; those of tables that did not run stay empty.

    Raises:
        OutputError: the file cannot be written.
    """

    def filled(match: re.Match[str]) -> str:
        name = match[1]
        if name == "command":
            return command
        if name == "summary":
            return f"Over {seeds} iterations: {summary_of(outcomes)}."
        return markdown_of(outcomes, name)

    text = files("seer_lab.paper").joinpath(TEMPLATE).read_text()
    page = PLACE.sub(filled, text)
    with replacing(path) as new:
        new.write_text(page)
