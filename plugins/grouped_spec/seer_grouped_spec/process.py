"""A draft server as the process that starts it sees it."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from seer_grouped_spec.handshake import TOKEN_VARIABLE
from seer_grouped_spec.server import Listening

__all__ = ["DraftServerError", "DraftServerProcess"]

POLL_S = 0.02
KILL_GRACE_S = 2.0
LOG_TAIL_BYTES = 2048
LINE_BYTES = 4096


class DraftServerError(Exception):
    """A draft server did not start."""


class DraftServerProcess:
    """One ``seer_grouped_spec.server``, which dies with this process.

    ``token`` is what its clients must know: random, unless it is given.  It is handed over by the
    environment, which other users cannot read.  Its complaints go to ``log_path``, or nowhere.  Linux ends it
    already with the *thread* that called ``start``, so call it on one that lives as long.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        memory_bytes: int = 4 << 30,
        start_timeout_s: float = 20.0,
        log_path: Path | None = None,
    ) -> None:
        self._command = [
            *(sys.executable, "-P", "-m", "seer_grouped_spec.server", "--host", host, "--port", str(port)),
            *("--memory-mib", str(memory_bytes / (1 << 20)), "--parent-pid", str(os.getpid())),
        ]  # -P: the directory it is started in may hold anybody's modules
        self.token = secrets.token_hex(32) if token is None else token
        self._start_timeout_s = start_timeout_s
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None
        self._endpoint: str | None = None

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        if self._endpoint is None:
            raise DraftServerError("the draft server is not running")
        return self._endpoint

    @property
    def pid(self) -> int | None:
        """Its process id; None while it is down."""
        return None if self._process is None else self._process.pid

    async def start(self) -> str:
        """Start it and return its endpoint; end an older one first.

        Raises:
            DraftServerError: it died, or took longer than ``start_timeout_s``; with its last words.
        """
        await self.stop()
        environment = {**os.environ, TOKEN_VARIABLE: self.token}
        with tempfile.TemporaryFile() if self._log_path is None else self._log_path.open("a+b") as words:
            self._process = process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=words,
                env=environment,
                start_new_session=True,
            )
            assert process.stdout is not None
            try:
                with process.stdout as stdout:
                    line = await _first_line(process, stdout, time.monotonic() + self._start_timeout_s)
                self._endpoint = msgspec.json.decode(line, type=Listening).endpoint
            except (TimeoutError, EOFError, msgspec.DecodeError) as error:
                how = f"not ready after {self._start_timeout_s:g} s"
                if not isinstance(error, TimeoutError):
                    how = f"it ended with status {process.poll()}"
                await self.stop()
                words.seek(max(0, words.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
                tail = words.read().decode(errors="replace").strip()
                raise DraftServerError(f"the draft server did not start: {how}\n{tail}".strip()) from error
            except BaseException:
                await self.stop()
                raise
        return self._endpoint

    async def stop(self) -> None:
        """End it: ask, wait, kill.  Idempotent, bounded."""
        process, self._process, self._endpoint = self._process, None, None
        if process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                process.send_signal(number)
            deadline = time.monotonic() + KILL_GRACE_S
            while process.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(POLL_S)
            if process.poll() is not None:
                return


async def _first_line(process: subprocess.Popen[bytes], stdout: IO[bytes], deadline: float) -> bytes:
    os.set_blocking(stdout.fileno(), False)
    line = b""
    while not line.endswith(b"\n"):
        with suppress(BlockingIOError):
            data = os.read(stdout.fileno(), LINE_BYTES)
            if not data or len(line) > LINE_BYTES:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
                raise EOFError
            line += data
            continue
        if time.monotonic() > deadline:
            raise TimeoutError
        await asyncio.sleep(POLL_S)
    return line
