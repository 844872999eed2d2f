"""Processes that tests look at."""

import os
import select


def wait_until_dead(pid, timeout_s=20):
    """Wait for the end of a process that need not be a child of ours."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)
