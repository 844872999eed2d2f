"""A limit of memory for reading a file that may have been made to fill it."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["limited_memory"]


@contextmanager
def limited_memory(more_bytes: int) -> Iterator[None]:
    """Let this process have so many more bytes of addresses, until the ``with`` block ends.

    Raises:
        MemoryError: it wanted more; libraries may raise errors of their own.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    wanted = pages * resource.getpagesize() + more_bytes
    limits = [each for each in (soft, hard) if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([wanted, *limits]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
