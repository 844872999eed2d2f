"""A draft server: ``python -m seer_grouped_spec.server`` keeps token logs and hands them on.

One thread around one ZeroMQ ROUTER socket.  Whatever arrives, it goes on: what cannot be read is counted
and answered with an error.  On standard output it says where it listens, one line of JSON, and no more.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import signal
import socket
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
import structlog
import zmq

from seer_core.process import die_with
from seer_grouped_spec.log import TokenLogs, UnknownClient
from seer_grouped_spec.wire import (
    MAX_KEY_BYTES,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    TOKEN_VARIABLE,
    Codec,
    Done,
    Failure,
    Fetch,
    Fetched,
    FromServer,
    Listening,
    Refusal,
    Register,
    Stats,
    StatsAsked,
    ToServer,
    Unregister,
    Update,
    Updated,
    WireError,
)

__all__ = ["DraftServer", "is_loopback", "main"]

SWEEP_MS = 1000
COMPLAINT_S = 1.0
MESSAGES_PER_TURN = 256
BACKLOG = 1024

log = structlog.get_logger("seer.draft_server")


class DraftServer:
    """What a server does with a frame; pure but for its complaints."""

    def __init__(self, memory_bytes: int, key: bytes = b"") -> None:
        self.logs = TokenLogs(memory_bytes)
        self.faults: Counter[str] = Counter()
        self._codec: Codec[ToServer] = Codec(ToServer, key)
        self._received_bytes = self._sent_bytes = self._messages = 0
        self._quiet_until = 0.0
        self._swept = 0.0

    def answer(self, frames: list[bytes], now: float) -> bytes:
        """Return the reply to a message, whatever it is; it never raises."""
        self._messages += 1
        self._received_bytes += sum(map(len, frames))
        try:
            if len(frames) != 1:
                raise WireError("message", f"a message of {len(frames)} frames; one is right")
            reply: FromServer = self._handle(self._codec.decode(frames[0]), now)
            frame = self._codec.encode(reply)
        except WireError as error:
            frame = self._refuse(0, error.kind, str(error), now)
        except Exception as error:
            frame = self._refuse(0, "internal", f"{type(error).__name__}: {error}", now)
        self._sent_bytes += len(frame)
        return frame

    def sweep(self, now: float) -> None:
        """Drop what has expired, at most once in ``SWEEP_MS``."""
        if 1000 * (now - self._swept) >= SWEEP_MS:
            self._swept = now
            self.logs.expire(now)

    def stats(self) -> dict[str, float]:
        """Return the figures of ``TokenLogs`` and of the wire."""
        return {
            **self.logs.stats(),
            "messages": self._messages,
            "received_bytes": self._received_bytes,
            "sent_bytes": self._sent_bytes,
            **{f"faults_{kind}": count for kind, count in self.faults.items()},
        }

    def _handle(self, message: ToServer, now: float) -> FromServer:
        match message:
            case Update(seq, client, groups):
                refused = []
                update = self.logs.update_cst
                for group_id, appends in groups:
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
            case Fetch(seq, client, infos):
                try:
                    return Fetched(seq, *self.logs.fetch_cst(client, infos, now))
                except UnknownClient:
                    return Failure(seq, "unknown_client", "register first: this client has no group here")
            case Register(seq, client, wanted):
                register = self.logs.register_group
                return Done(seq, [id for id, ttl_s in wanted if not register(client, id, ttl_s, now)])
            case Unregister(seq, client, ids):
                for group_id in ids:
                    self.logs.unregister_group(client, group_id)
                return Done(seq, [])
            case StatsAsked(seq):
                return Stats(seq, self.stats())

    def _refuse(self, seq: int, kind: str, reason: str, now: float) -> bytes:
        self.faults[kind] += 1
        if now >= self._quiet_until:
            self._quiet_until = now + COMPLAINT_S
            log.warning("draft_message_refused", kind=kind, reason=reason, so_far=self.faults[kind])
        return self._codec.encode(Failure(seq, kind, reason))


def serve(
    router: zmq.Socket[bytes], server: DraftServer, ending: socket.socket, parent_pid: int | None
) -> None:
    """Answer until something arrives on ``ending``, or the parent is gone."""
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    poller.register(ending, zmq.POLLIN)
    while True:
        ready = dict(poller.poll(SWEEP_MS))
        if ending.fileno() in ready or parent_pid not in (None, os.getppid()):
            return
        server.sweep(time.monotonic())
        for _ in range(MESSAGES_PER_TURN if router in ready else 0):
            try:
                sender, *frames = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            router.send_multipart([sender, server.answer(frames, time.monotonic())])


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(context: zmq.Context[zmq.Socket[bytes]], host: str, port: int) -> tuple[zmq.Socket[bytes], str]:
    """Return a socket that listens, and where."""
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    router.setsockopt(zmq.BACKLOG, BACKLOG)
    router.setsockopt(zmq.IPV6, int(":" in host))
    host = "127.0.0.1" if host == "localhost" else f"[{host}]" if ":" in host else host
    router.bind(f"tcp://{host}:{port or '*'}")
    return router, router.getsockopt_string(zmq.LAST_ENDPOINT)


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT, or until the parent dies; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m seer_grouped_spec.server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="port to bind (default 0: a free one)")
    parser.add_argument("--memory-mib", type=float, default=4096, help="for all logs (default 4096)")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"holds the token that every message must carry (default: the environment's {TOKEN_VARIABLE});"
        " needed beyond loopback",
    )
    parser.add_argument("--parent-pid", type=int, metavar="PID", help="die with this process, the parent")
    options = parser.parse_args(arguments)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    if options.parent_pid is not None:
        die_with(options.parent_pid)
    try:
        key = _read_token(options.token_file)
    except (OSError, ValueError) as error:
        parser.error(f"the token: {error}")
    if not key and not is_loopback(options.host):
        parser.error(
            f"--host {options.host} can be reached from other machines: give a token, with --token-file"
            f" or {TOKEN_VARIABLE}"
        )
    wakes, ending = socket.socketpair()
    for side in (wakes, ending):
        side.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: None)  # the wake-up is enough
    with zmq.Context() as context:
        try:
            router, endpoint = bind(context, options.host, options.port)
        except zmq.ZMQError as error:
            parser.error(f"cannot listen on {options.host}, port {options.port}: {error}")
        with router:
            line = Listening(endpoint, os.getpid(), PROTOCOL_VERSION)
            print(msgspec.json.encode(line).decode(), flush=True)
            server = DraftServer(int(options.memory_mib * (1 << 20)), key)
            serve(router, server, ending, options.parent_pid)
    return 0


def _read_token(path: Path | None) -> bytes:
    text = os.environ.get(TOKEN_VARIABLE) if path is None else path.read_text()
    if text is None:
        return b""
    key = text.strip().encode()
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"it has {len(key)} bytes; 1 to {MAX_KEY_BYTES} are right")
    return key


if __name__ == "__main__":
    sys.exit(main())
