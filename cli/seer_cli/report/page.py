"""The page: one HTML file with its data, its style and its chart library in it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path

import click
import msgspec

from seer_cli.output import replacing
from seer_cli.report.data import RunData

__all__ = ["REPORT_OPTION", "page_of", "write_page"]

PARTS = ("page.html", "page.css", "page.js", "echarts.min.js")

REPORT_OPTION = click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a page that shows them side by side, as `seer report` does.",
)


def page_of(title: str, runs: Sequence[RunData]) -> str:
    """Return the page of one run, or of several side by side, as HTML.

    Its content security policy lets the two scripts in it run, which are named by their hashes, and nothing
    else: no other script, and no request to any address.
    """
    parts = files(__package__)
    text = {name: (parts / name).read_text(encoding="utf-8") for name in PARTS}
    scripts = {"echarts": text["echarts.min.js"], "script": text["page.js"]}
    data = msgspec.json.encode({"runs": list(runs)}).decode()
    values = {
        "title": escape(title),
        "css": text["page.css"],
        "policy": " ".join(f"'sha256-{_digest(script)}'" for script in scripts.values()),
        "data": data.replace("<", "\\u003c"),  # so that no id can end the element
        **scripts,
    }
    page = text["page.html"]
    pieces = []
    for name in ("policy", "title", "css", "title", "data", "echarts", "script"):
        before, page = page.split("{" + name + "}", 1)
        pieces += [before, values[name]]
    return "".join([*pieces, page])


def write_page(path: Path, title: str, runs: Sequence[RunData]) -> None:
    """Write the page, whole or not at all.

    Raises:
        OutputError: the file cannot be written.
    """
    page = page_of(title, runs)
    with replacing(path) as new:
        new.write_text(page, encoding="utf-8")


def _digest(script: str) -> str:
    return b64encode(sha256(script.encode()).digest()).decode()
