"""A directory on disk that goes with the process that made it, killed or not."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from seer_mooncake import cleanup

__all__ = ["DiskDirectory"]

STOP_S = 8.0


class DiskDirectory:
    """A directory held by a process of its own (``cleanup``), which outlives this one to remove it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._cleanup: subprocess.Popen[bytes] | None = subprocess.Popen(
            [sys.executable, "-I", cleanup.__file__, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the runtime
        )

    @property
    def ready(self) -> bool:
        """Whether the directory has been made."""
        return self.path.is_dir()

    def close(self) -> None:
        """Remove the directory; bounded, idempotent."""
        process, self._cleanup = self._cleanup, None
        if process is None:
            return
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
