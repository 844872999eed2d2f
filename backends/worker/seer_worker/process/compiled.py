"""Where torch keeps what it compiles: in a directory that no other user can make first.

By itself it takes ``torchinductor_USER`` in the temporary directory, and loads libraries and pickles from
there: a user who makes that directory first has code run by the one whose name it bears.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["keep_compiled_private"]

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def keep_compiled_private() -> None:
    """Have torch, imported after this, keep what it compiles in this user's own cache, if there is one."""
    if VARIABLE in os.environ:
        return
    with suppress(OSError, RuntimeError):  # no home, or none that may be written
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        place = Path(home, "seer", "torchinductor")
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ[VARIABLE] = str(place)
