"""A reward process: responses as lines on standard input, answers as lines on standard output."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path

import msgspec

from seer_core.error_origin import describe_error, fact_of, is_sentence
from seer_core.errors import printable, quote
from seer_rl.references import resolve
from seer_rl.responses import Response
from seer_rl.rewards import RewardAnswer, flaw_of_reward

LONGEST_TRACEBACK = 20_000
"""Characters of a traceback that are printed, from its end."""

MOST_TRACEBACKS = 100
"""Reasons whose traceback is printed."""


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
    except BaseException as error:  # no Ctrl-C: this process has no terminal
        raised = f"[train].reward: {quote(reference)} raised {describe_error(error, '')}"
        send(RewardAnswer(error=printable(str(error)) if is_sentence(error) else raised))
        return
    send(RewardAnswer())
    decoder = msgspec.json.Decoder(Response)
    place, process = str(getattr(reward, "__module__", "")), os.getpid()
    printed: set[str] = set()
    while True:
        response = decoder.decode(lines.get())
        try:
            given = reward(response)
            value = float(given)
        except BaseException as error:
            answer = RewardAnswer(error=_reason(error, place))
            if answer.error not in printed and len(printed) < MOST_TRACEBACKS:
                printed.add(answer.error)
                _print_traceback(error)
        else:
            flaw = flaw_of_reward(value)
            answer = RewardAnswer(error=flaw) if flaw else RewardAnswer(value)
        if os.getpid() != process:  # the reward has forked, and its child came back here
            os.kill(os.getpid(), signal.SIGKILL)
        send(answer)


def _reason(error: BaseException, place: str) -> str:
    """Return why there is no reward; what ``float`` itself refuses was raised in no line of the user's."""
    raised = sys.exc_info()[2]  # an error's own attributes may raise
    if raised is not None and raised.tb_next is None:
        return f"{fact_of(error)}; a reward must be a finite number"
    return describe_error(error, place)


def _print_traceback(error: BaseException) -> None:
    """Print where an error was raised, if its text and standard error allow that."""
    with suppress(BaseException):
        text = "".join(traceback.format_exception(error))
        os.write(2, text[-LONGEST_TRACEBACK:].encode(errors="backslashreplace"))


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
