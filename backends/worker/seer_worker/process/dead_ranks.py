"""The end of an instance, one of whose ranks has died, where its worker does not come to notice it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import structlog

__all__ = ["NOTICE_S", "end_after_grace", "send_reason_by"]

log = structlog.get_logger("seer")

NOTICE_S = 2.0
"""How long an error of a rank that lives may come before the end of the one that caused it by dying."""
GRACE_S = 10.0
"""How long a worker may take to report a dead rank.  One that is idle, or waits for it in C++, does not."""

_senders: list[Callable[[str], None]] = []


def send_reason_by(send: Callable[[str], None]) -> None:
    """Have the reason of such an end sent to the runtime by ``send``."""
    _senders[:] = [send]


def end_after_grace(reason: str, closing: Callable[[], bool]) -> None:
    """End this process after some seconds, unless it is ``closing``; called in a thread of its own."""
    time.sleep(GRACE_S)
    if not closing():
        log.error("rank_ended", reason=reason)
        for send in _senders:
            send(reason)
        os._exit(1)
