"""The page: one HTML file with its data, its style and its chart library in it."""

from __future__ import annotations

from base64 import b64encode
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from seer_cli.output import replacing
from seer_cli.report.data import RunData

__all__ = ["live_page", "page_of", "policy_of", "write_page"]

ALONE = 2
"""Of so many runs, side by side, each has all that the page of one run has."""
MOST_CHUNKS, LEAST_CHUNKS = 18_000, 1_000
"""Chunks of all runs on a page of more, and of each run at least."""
MOST_LIVES, LEAST_LIVES = 200, 30
"""Requests that are listed one by one, likewise."""


def page_of(title: str, runs: Sequence[RunData]) -> str:
    """Return the page of one run, or of several side by side, as HTML.

    Its content security policy lets the two scripts in it run, which are named by their hashes, and nothing
    else: no other script, and no request to any address.
    """
    return _page(title, {"runs": [_shortened(run, len(runs)) for run in runs]}, policy_of())


def _shortened(run: RunData, runs: int) -> RunData:
    """Return what the page of several runs has of each: fewer chunks, and fewer requests one by one."""
    if runs <= ALONE:
        return run
    chunks, requests = run.chunks, run.chunk_requests
    of_requests = chunks["request"]
    if len(of_requests) > (most := max(LEAST_CHUNKS, MOST_CHUNKS // runs)):
        first = of_requests[-most - 1] + 1  # whole requests, and those that finished last
        begin = bisect_left(of_requests, first)
        chunks = {name: column[begin:] for name, column in chunks.items()}
        chunks["request"] = [each - first for each in chunks["request"]]
        requests = requests[first:]
    lives = run.lives[: max(LEAST_LIVES, MOST_LIVES // runs)]
    return msgspec.structs.replace(run, chunks=chunks, chunk_requests=requests, lives=lives)


def live_page(title: str, *, controls: bool) -> str:
    """Return the page that asks its server for figures, with buttons where it takes commands."""
    return _page(title, {"runs": [], "live": True, "controls": controls}, policy_of(live=True))


@cache
def policy_of(*, live: bool = False) -> str:
    """Return the content security policy of a page; a live one may ask its own server."""
    scripts = " ".join(f"'sha256-{_digest(_part(name))}'" for name in ("echarts.min.js", "page.js"))
    connect = " connect-src 'self';" if live else ""
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:;{connect} script-src {scripts};"
        " base-uri 'none'; form-action 'none'"
    )


def _page(title: str, data: Mapping[str, Any], policy: str) -> str:
    values = {
        "policy": policy,
        "title": escape(title),
        "css": _part("page.css"),
        "data": msgspec.json.encode(data).decode().replace("<", "\\u003c"),  # so that no id ends the element
        "echarts": _part("echarts.min.js"),
        "script": _part("page.js"),
    }
    rest = _part("page.html")
    pieces = []
    for name in ("policy", "title", "css", "title", "data", "echarts", "script"):
        before, rest = rest.split("{" + name + "}", 1)
        pieces += [before, values[name]]
    return "".join([*pieces, rest])


@cache
def _part(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


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
