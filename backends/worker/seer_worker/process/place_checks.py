"""Checks of the place where a worker runs, before its engine starts: Seer itself, and the model's files."""

from __future__ import annotations

import platform
import socket
import sys
from pathlib import Path

from seer_core.errors import EngineError
from seer_worker.client.digest import digest_of
from seer_worker.seer_version import seer_version
from seer_worker.wire import Start

__all__ = ["check_place"]


def check_place(start: Start) -> None:
    """Compare what is here with what the runtime has.

    Raises:
        EngineError: Seer is of another version here, or the model is not here, or another one.
    """
    host, found = socket.gethostname(), seer_version()
    if start.seer and found and found != start.seer:
        raise EngineError(
            f"{sys.executable} on {host}, of Python {platform.python_version()}, has Seer {found}, and the"
            f" runtime has Seer {start.seer}; install the same version there"
        )
    if not start.model_dir:
        return
    remedy = "copy the runtime's there, or name a directory on a file system of all nodes"
    try:
        digest = digest_of(Path(start.model_dir))
    except OSError as error:
        raise EngineError(
            f"the model in {start.model_dir} cannot be read on {host}: {error.strerror or error}; {remedy}"
        ) from error
    if digest != start.model_digest:
        raise EngineError(
            f"the model in {start.model_dir} on {host} is not the runtime's: its files have the digest"
            f" {digest}, not {start.model_digest}; {remedy}"
        )
