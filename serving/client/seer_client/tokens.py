"""The token of a server of the same user on this machine, which it keeps in a file named after its port.

Each start of a server makes a new one.
"""

from __future__ import annotations

import ipaddress
import os
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

__all__ = ["token_of"]


def token_of(url: str) -> str | None:
    """Return the token for the server at ``url``; None if it is elsewhere, or has left none here."""
    try:
        parts = urlsplit(url)
        local = parts.hostname == "localhost" or ipaddress.ip_address(parts.hostname or "").is_loopback
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        folder = Path(runtime, "seer") if runtime else Path(tempfile.gettempdir(), f"seer-{os.getuid()}")
        path = folder / f"{parts.port}.token"
        if not local or folder.lstat().st_uid != os.getuid() or path.lstat().st_uid != os.getuid():
            return None
        return path.read_text("ascii").strip()
    except (OSError, ValueError):
        return None
