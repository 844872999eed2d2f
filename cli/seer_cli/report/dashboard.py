"""The page of a report while its run goes on, served to browsers on this machine.

The run's own thread only puts events into a queue, which a thread of a ``FeedReader`` reads.  The figures
are made when a browser asks, so seldom that this takes a hundredth of the time: any number of viewers get the
same figures, and a page that is closed costs nothing.  All addresses need the token of the printed one.  The
server listens on loopback, and answers only requests that name it as their host, so that no other page can
reach it by a name of its own.  ``ViewerPort`` bounds what connections take of the run.
"""

from __future__ import annotations

import hmac
import re
import secrets
import threading
import time
from collections.abc import Callable
from urllib.parse import parse_qs

import click
import msgspec
from seer_host.viewer_port import ViewerHandler, ViewerPort

from seer_cli.controls import RunCommand
from seer_cli.report.feed import FeedReader
from seer_cli.report.page import live_page, policy_of
from seer_core.errors import OutputError, SeerError
from seer_core.ports.policy import Observer

__all__ = ["Dashboard"]

HOST = "127.0.0.1"
LAST_PORT = 65_535
LEAST_AGE_S = 1.0
COST_SHARE = 0.01
"""Figures are made anew only after so long that making them takes this part of the time."""
TOKEN_HEADER = "X-Seer-Token"
LONGEST_COMMAND = 65_536
"""Bytes of a command."""
DIGITS = re.compile("[0-9]{1,9}")


class Dashboard:
    """Serves a page about one run or several while they go on; a context manager.

    ``control`` carries a command out and returns a sentence for the viewer; it is called in a thread of the
    server, and its ``SeerError`` is shown.  Without it the page has no buttons.  The page has the runs of
    ``feeds``, and those that ``watch`` adds.

    Raises:
        OutputError: the port is taken, or is none.
    """

    def __init__(
        self,
        title: str,
        port: int = 0,
        control: Callable[[RunCommand], str] | None = None,
        feeds: FeedReader | None = None,
    ) -> None:
        self.title, self.control = title, control
        self.token = secrets.token_urlsafe(24)
        self._feeds = FeedReader() if feeds is None else feeds
        self._lock = threading.Lock()
        self._figures = b""
        self._made_at = -1e9
        self._cost_s = 0.0
        if not 0 <= port <= LAST_PORT:
            raise OutputError(f"the dashboard cannot listen on port {port}; name one from 0 to {LAST_PORT}")
        try:
            self._server = ViewerPort(HOST, port, _handler(self), "seer-dashboard")
        except OSError as error:
            raise OutputError(
                f"the dashboard cannot listen on port {port}: {error.strerror}; name another, or none"
            ) from error
        self.port = self._server.port

    @property
    def address(self) -> str:
        """The address of the page, with its token."""
        return f"http://{HOST}:{self.port}/?token={self.token}"

    def watch(self, name: str, rollouts: int = 1, window_s: float | None = None) -> Observer:
        """Return an observer that shows a run: of a training the latest ``rollouts``, and of a run without an
        end the latest ``window_s`` seconds.
        """
        with self._lock:
            self._made_at = -1e9
        return self._feeds.watch(name, rollouts, window_s)

    def figures(self) -> bytes:
        """Return the page's figures as JSON, as old as the cost of making them asks for."""
        with self._lock:
            if time.monotonic() - self._made_at > max(LEAST_AGE_S, self._cost_s / COST_SHARE):
                began_s = time.thread_time()
                self._figures = msgspec.json.encode({"runs": self._feeds.runs()})
                self._made_at, self._cost_s = time.monotonic(), time.thread_time() - began_s
            return self._figures

    def __enter__(self) -> Dashboard:
        self._server.start()
        self._feeds.__enter__()
        click.echo(f"dashboard: {self.address}", err=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._feeds.__exit__()
        self._server.close()


def _handler(dashboard: Dashboard) -> type[ViewerHandler]:
    """Return the class that answers the requests of one dashboard."""

    class PageHandler(ViewerHandler):
        """Answers a browser; the token is checked before anything else of a request is looked at."""

        def do_GET(self) -> None:
            """Answer with the page or with its figures."""
            path, _, query = self.path.partition("?")
            token = parse_qs(query).get("token", [""])[0] or self.headers.get(TOKEN_HEADER, "")
            if not self._may(token):
                return
            if path == "/":
                page = live_page(dashboard.title, controls=dashboard.control is not None)
                self._answer(200, page.encode(), "text/html; charset=utf-8")
            elif path == "/figures":
                self._answer(200, dashboard.figures(), "application/json")
            else:
                self._answer(404, b"there is no such page", "text/plain")

        def do_POST(self) -> None:
            """Carry a command out."""
            if not self._may(self.headers.get(TOKEN_HEADER, "")):  # in a header, which no other page can set
                return
            length = self.headers.get("Content-Length", "")
            if not DIGITS.fullmatch(length) or int(length) > LONGEST_COMMAND:
                return self._answer(413, b"the command has no length, or is too long", "text/plain")
            body = self.rfile.read(int(length))
            if self.path.partition("?")[0] != "/command" or dashboard.control is None:
                return self._answer(404, b"there is no such command", "text/plain")
            try:
                said = dashboard.control(msgspec.json.decode(body, type=RunCommand))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, SeerError) as error:
                return self._answer(400, str(error).encode(), "text/plain; charset=utf-8")
            self._answer(200, said.encode(), "text/plain; charset=utf-8")

        def _may(self, token: str) -> bool:
            """Return whether the request is one of the page's own; otherwise answer it."""
            hosts = (f"{HOST}:{dashboard.port}", f"localhost:{dashboard.port}")
            known = hmac.compare_digest(token.encode("utf-8", "replace"), dashboard.token.encode())
            if known and self.headers.get("Host") in hosts:
                return True
            self._answer(403, b"open the address that the command has printed", "text/plain")
            return False

        def _answer(self, status: int, body: bytes, kind: str) -> None:
            headers = {
                "Content-Type": kind,
                "Cache-Control": "no-store",
                "Content-Security-Policy": policy_of(live=True),
                "Referrer-Policy": "no-referrer",
                "X-Content-Type-Options": "nosniff",
                "X-Frame-Options": "DENY",
            }
            self.reply(status, body, headers)

    return PageHandler
