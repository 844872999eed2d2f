"""A reward process: responses as lines on standard input, answers as lines on standard output."""

from __future__ import annotations

import math
import os
import queue
import signal
import sys
import threading
import traceback
from pathlib import Path

import msgspec

from seer_core.errors import ConfigError
from seer_rl.references import resolve
from seer_rl.responses import Response
from seer_rl.rewards import RewardAnswer

SHOWN = 500
"""Characters of an error that are sent."""


def main() -> None:
    """RewardAnswer until standard input ends."""
    reference, base_dir = sys.argv[1:]
    requests, answers = os.dup(0), os.dup(1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # what a reward starts may read; no request is meant for it
    os.dup2(2, 1)  # what a reward prints is no answer

    def send(answer: RewardAnswer) -> None:
        os.write(answers, msgspec.json.encode(answer) + b"\n")

    lines = _lines(requests)
    try:
        reward = resolve("[train].reward", reference, Path(base_dir))
    except ConfigError as error:
        send(RewardAnswer(error=str(error)))
        return
    send(RewardAnswer())
    decoder = msgspec.json.Decoder(Response)
    reported: set[str] = set()
    while True:
        response = decoder.decode(lines.get())
        try:
            value = float(reward(response))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:SHOWN]
            if reason not in reported:
                traceback.print_exc()
            reported.add(reason)
            send(RewardAnswer(error=reason))
        else:
            if math.isfinite(value):
                send(RewardAnswer(value))
            else:
                send(RewardAnswer(error=f"it is {value}; a reward must be a finite number"))


def _lines(requests: int) -> queue.SimpleQueue[bytes]:
    """Read in a thread, which ends the process with its parent even while a reward sleeps."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        with open(requests, "rb") as file:
            for line in file:
                lines.put(line)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()
    return lines


if __name__ == "__main__":
    main()
