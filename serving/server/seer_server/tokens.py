"""The token that clients must bring: from a file of the user's, or one that the server makes for its port.

The server's own lies where clients of the same user on the same machine find it by the port:
``$XDG_RUNTIME_DIR/seer/PORT.token``, or ``seer-UID/PORT.token`` in the temporary directory.  It stays there,
so that clients outlive a server that is started again.
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


def own_token(port: int) -> tuple[str, Path]:
    """Return the token of a port, made if there is none yet, and the file of mode 0600 that holds it.

    Raises:
        ConfigError: the file cannot be made, or others could read it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime, "seer") if runtime else Path(tempfile.gettempdir(), f"seer-{os.getuid()}")
    path = folder / f"{port}.token"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        _require_private(folder)
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            _require_private(path)
            return read_token(path), path
        with os.fdopen(file, "w") as opened:
            opened.write(f"{secrets.token_hex(32)}\n")
        return read_token(path), path
    except OSError as error:
        raise ConfigError(f"cannot keep a token in {path}: {error}; name a --token-file") from error


def _require_private(path: Path) -> None:
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{path} can be read or changed by others; delete it, or name a --token-file")
