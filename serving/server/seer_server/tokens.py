"""The token that clients must bring: from a file of the user's, or one that the server makes for its port.

The server's own lies where clients of the same user on the same machine find it by the port:
``$XDG_RUNTIME_DIR/seer/PORT.token``, or ``seer-UID/PORT.token`` in the temporary directory.  Each start makes
a new one, after the port was taken: what another program on the port was sent before is of no use to it.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from pathlib import Path

from seer_core.errors import ConfigError

__all__ = ["own_token", "read_token"]

LEAST_CHARACTERS = 16


def read_token(path: Path) -> str:
    """Return the token in a file.

    Raises:
        ConfigError: there is none.
    """
    try:
        token = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; name a file that holds a token") from error
    if not token.isascii() or len(token) < LEAST_CHARACTERS:
        raise ConfigError(
            f"the token in {path} is no {LEAST_CHARACTERS} ASCII characters or more; make one:"
            " openssl rand -hex 32"
        )
    return token


def own_token(port: int, *, new: bool = False) -> tuple[str, Path]:
    """Return the token of a port, made if there is none yet, and the file of mode 0600 that holds it.

    A process that holds the port makes a ``new`` one in any case.

    Raises:
        ConfigError: the file cannot be made, or others could read it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime, "seer") if runtime else Path(tempfile.gettempdir(), f"seer-{os.getuid()}")
    path = folder / f"{port}.token"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        _require_private(folder)
        if os.path.lexists(path):
            _require_private(path)
            if not new:
                return read_token(path), path
        token = secrets.token_hex(32)
        written = path.with_suffix(f".{secrets.token_hex(4)}")
        with os.fdopen(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.write(f"{token}\n")
        written.replace(path)  # clients find the old one or the new one, and none in part
        return token, path
    except OSError as error:
        raise ConfigError(f"cannot keep a token in {path}: {error}; name a --token-file") from error


def _require_private(path: Path) -> None:
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{path} can be read or changed by others; delete it, or name a --token-file")
