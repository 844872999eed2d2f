"""A draft server: ``python -m seer_grouped_spec.server`` keeps token logs and hands them on.

One thread.  Whatever arrives, it goes on: what cannot be read is counted and answered with an error.  On
standard output it says where it listens, one line of JSON, and no more.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

import msgspec
import structlog

from seer_core.process import die_with
from seer_grouped_spec.handshake import PROTOCOL_VERSION, TOKEN_VARIABLE
from seer_grouped_spec.log import TokenLogs
from seer_grouped_spec.peers import Peers
from seer_grouped_spec.wire import (
    MAX_APPENDS,
    MAX_MESSAGE_BYTES,
    Codec,
    Done,
    Failure,
    Fetch,
    Fetched,
    FromServer,
    Refusal,
    Register,
    Stats,
    StatsAsked,
    ToServer,
    Unregister,
    Update,
    Updated,
    WireError,
    read_appends,
    read_info,
)

__all__ = ["DraftServer", "Listening", "is_loopback", "main"]

SWEEP_S = 1.0
SILENCE_S = 60.0
"""Whoever has part in a group asks for news all the time; after so long without a word it is dead."""

BACKLOG = 1024
ROOM_SHARE = 8
"""Messages under way may take an eighth of the memory for logs on top of it, and two whole ones at least."""

MAX_TOKEN_BYTES = 255

log = structlog.get_logger("seer.draft_server")


class Listening(msgspec.Struct, frozen=True):
    """The line that a server prints, as JSON, when it can be reached."""

    endpoint: str
    pid: int
    protocol: int


class DraftServer:
    """What a server does with a message; pure but for its complaints."""

    def __init__(self, memory_bytes: int) -> None:
        self.logs = TokenLogs(memory_bytes)
        self.peers: Peers | None = None
        self._codec: Codec[ToServer] = Codec(ToServer)
        self._messages = 0
        self._swept = 0.0

    def listen(self, listener: socket.socket, token: bytes) -> Peers:
        """Return the connections whose messages it answers."""
        room_bytes = max(self.logs.memory_bytes // ROOM_SHARE, 2 * MAX_MESSAGE_BYTES)
        self.peers = Peers(listener, token, room_bytes, self.answer, self.logs.leave)
        return self.peers

    def answer(self, client: int, message: bytes, now: float) -> bytes:
        """Return the frame that answers a message, whatever it is; it never raises."""
        self._messages += 1
        try:
            return self._codec.encode(self._handle(client, self._codec.decode(message), now))
        except WireError as error:
            return self._refuse("message", str(error), now)
        except Exception as error:
            return self._refuse("internal", f"{type(error).__name__}: {error}", now)

    def sweep(self, now: float) -> None:
        """Drop what has expired, at most once in ``SWEEP_S``."""
        if now - self._swept >= SWEEP_S:
            self._swept = now
            self.logs.expire(now)
            if self.peers is not None:
                self.peers.sweep(now, SILENCE_S, self.logs.has_part)

    def stats(self) -> dict[str, float]:
        """Return the figures of ``TokenLogs`` and of the connections."""
        figures = {**self.logs.stats(), "messages": self._messages}
        if self.peers is not None:
            figures |= {
                "received_bytes": self.peers.received_bytes,
                "sent_bytes": self.peers.sent_bytes,
                **{f"faults_{kind}": count for kind, count in self.peers.faults.items()},
            }
        return figures

    def _handle(self, client: int, message: ToServer, now: float) -> FromServer:
        match message:
            case Update(seq, groups):
                refused = []
                room = MAX_APPENDS
                update = self.logs.update_cst
                for group_id, raw in groups:
                    appends = read_appends(raw)
                    room -= len(appends)
                    if room < 0:
                        raise WireError(f"an update of more than {MAX_APPENDS} appends")
                    for append in appends:
                        refusal: Refusal | None = update(
                            client,
                            group_id,
                            append.request_id,
                            append.prev_token_count,
                            append.new_tokens,
                            now,
                        )
                        if refusal is not None:
                            refused.append(refusal)
                return Updated(seq, refused)
            case Fetch(seq, infos):
                for group_id, raw in infos.items():
                    self.logs.restate(client, group_id, read_info(raw))
                return Fetched(seq, *self.logs.fetch_cst(client, now))
            case Register(seq, wanted):
                register = self.logs.register_group
                return Done(seq, [id for id, ttl_s in wanted if not register(client, id, ttl_s, now)])
            case Unregister(seq, ids):
                for group_id in ids:
                    self.logs.unregister_group(client, group_id)
                return Done(seq, [])
            case StatsAsked(seq):
                return Stats(seq, self.stats())

    def _refuse(self, kind: str, reason: str, now: float) -> bytes:
        if self.peers is not None:
            self.peers.complain(kind, reason, now)
        return self._codec.encode(Failure(0, kind, reason))


def serve(server: DraftServer, peers: Peers, ending: socket.socket, parent_pid: int | None) -> None:
    """Answer until something arrives on ``ending``, or the parent is gone."""
    peers.watch(ending.fileno())
    while parent_pid in (None, os.getppid()):
        peers.turn(SWEEP_S)
        try:
            ending.recv(1)
            return
        except BlockingIOError:
            server.sweep(time.monotonic())


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> tuple[socket.socket, str]:
    """Return a socket that listens, and where.

    Raises:
        OSError: it cannot.
    """
    host = "127.0.0.1" if host == "localhost" else host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    listener.setblocking(False)
    host, port = listener.getsockname()[:2]
    return listener, f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class Parser(argparse.ArgumentParser):
    """One that says what is wrong in one sentence."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        self.exit(2, f"error: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT, or until the parent dies; return the exit status."""
    parser = Parser(prog="python -m seer_grouped_spec.server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default 127.0.0.1)")
    parser.add_argument("--port", type=_port, default=0, help="port to bind (default 0: a free one)")
    parser.add_argument(
        "--memory-mib",
        type=_mib,
        default=4096.0,
        help="for all logs (default 4096); messages under way take an eighth of it at most on top, or 4",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"holds the token that whoever connects must know (default: the environment's {TOKEN_VARIABLE})",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="serve every user of this machine, without a token; on loopback only",
    )
    parser.add_argument("--parent-pid", type=int, metavar="PID", help="die with this process, the parent")
    options = parser.parse_args(arguments)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    if options.parent_pid is not None:
        die_with(options.parent_pid)
    try:
        token = _read_token(options.token_file)
    except (OSError, ValueError) as error:
        parser.error(f"the token: {error}")
    if not token and not is_loopback(options.host):
        parser.error(
            f"--host {options.host} can be reached from other machines: give a token, with --token-file"
            f" or {TOKEN_VARIABLE}"
        )
    if not token and not options.insecure:
        parser.error(
            "every user of this machine could read and write drafts: give a token, with --token-file or"
            f" {TOKEN_VARIABLE}, or say --insecure"
        )
    wakes, ending = socket.socketpair()
    for side in (wakes, ending):
        side.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: None)  # the wake-up is enough
    try:
        listener, endpoint = listen(options.host, options.port)
    except (OSError, UnicodeError) as error:
        parser.error(f"cannot listen on {options.host}, port {options.port}: {error}")
    with listener, wakes, ending:
        server = DraftServer(int(options.memory_mib * (1 << 20)))
        peers = server.listen(listener, token)
        line = Listening(endpoint, os.getpid(), PROTOCOL_VERSION)
        print(msgspec.json.encode(line).decode(), flush=True)
        serve(server, peers, ending, options.parent_pid)
        peers.close()
    return 0


def _port(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 5 or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port; 0 to 65535 are")
    return int(text)


def _mib(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1 << 30:
        raise argparse.ArgumentTypeError(f"{text} is no size; more than 0 is, to a PiB")
    return value


def _read_token(path: Path | None) -> bytes:
    text = os.environ.get(TOKEN_VARIABLE) if path is None else path.read_text()
    if text is None:
        return b""
    token = text.strip().encode()
    if not 1 <= len(token) <= MAX_TOKEN_BYTES:
        raise ValueError(f"it has {len(token)} bytes; 1 to {MAX_TOKEN_BYTES} are right")
    return token


if __name__ == "__main__":
    sys.exit(main())
