"""Rewards while the rollout goes on: in processes of their own, each response within a time limit.

A reward function is other people's code on a model's text: it may raise, hang, print, leak or crash.  Then
its one response has no reward; a process that ended is replaced, and nothing else is lost.

A reward is a finite number from ``-LARGEST_REWARD`` to ``LARGEST_REWARD``.  Any other is refused, so its
response has none: advantages of larger ones, or gradients, whose squares are added up as 32-bit floats, would
be infinite, and the weights lost.
"""

from __future__ import annotations

import math
import os
import queue
import select
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog
from seer_host.process import ChildProcess

from seer_core.error_origin import one_line
from seer_core.errors import ConfigError, quote
from seer_rl.errors import RewardError
from seer_rl.responses import Response

__all__ = ["LARGEST_REWARD", "RewardAnswer", "RewardPool", "flaw_of_reward"]

LARGEST_REWARD = 1e15
"""The most that a reward may be, up or down; the square of a 32-bit float is finite up to 1.8e19."""

START_S = 120.0
"""A reward may import a verifier with its models, which takes a while."""

MOST_LATE = 16
"""Responses in a row that may cost a reward its whole time limit; then it is not asked any more."""

log = structlog.get_logger("seer")


class RewardAnswer(msgspec.Struct, frozen=True):
    """A message of a reward process: that it is up, a reward, or what went wrong; ``late`` if none came."""

    reward: float = 0.0
    error: str = ""
    late: bool = False


def flaw_of_reward(value: float) -> str:
    """Return why a number is no reward, in a sentence about it; empty if it is one."""
    if not math.isfinite(value):
        return f"it is {value}; a reward must be a finite number"
    if abs(value) > LARGEST_REWARD:
        return f"it is {value:g}; a reward must be a number from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}"
    return ""


class RewardPool:
    """Reward processes, as many as may compute at a time; a context manager, entered once."""

    def __init__(self, reference: str, base_dir: Path, workers: int, timeout_s: float) -> None:
        self._workers = [_Worker(reference, base_dir) for _ in range(workers)]
        self._timeout_s = timeout_s
        self._late = 0
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(workers, "seer-reward")

    def __enter__(self) -> RewardPool:
        """Start all processes.

        Raises:
            ConfigError: the function cannot be imported.
        """
        try:
            list(self._threads.map(_Worker.start, self._workers))
        except BaseException:
            self.close()
            raise
        for worker in self._workers:
            self._idle.put(worker)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up what has not begun, and kill all processes, so that what has begun fails."""
        for worker in self._workers:
            worker.give_up()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.kill()

    def submit(self, response: Response) -> Future[float]:
        """Return the future reward of a response, the function's and its environment's added up.

        It is a ``RewardError`` if the function gave none.

        After ``MOST_LATE`` responses in a row that took too long no further one is judged.
        """
        return self._threads.submit(self._judge, response)

    def _judge(self, response: Response) -> float:
        try:
            line = msgspec.json.encode(response)
        except Exception as error:  # an object's, an integer's or a deep list's, each has a class of its own
            raise RewardError(f"its metadata is no JSON: {one_line(error)}") from error
        if self._late >= MOST_LATE:
            raise RewardError(
                f"{self._late} responses before it took longer than {self._timeout_s:g} s, one after the"
                " other; mend the reward, or raise [train.rewards].timeout_s"
            )
        worker = self._idle.get()  # there are as many as threads
        try:
            try:
                answer = worker.ask(line, self._timeout_s)
            except _Died as died:
                if worker.given_up:
                    raise
                # Perhaps not by this response: the kernel, short of memory, kills any process.
                log.warning("reward_process_died", status=died.status, then="its response is judged again")
                answer = worker.ask(line, self._timeout_s)
        except _Died as died:
            times = "was ended" if worker.given_up else "died twice"
            raise RewardError(f"its process {times}, with exit status {died.status}") from died
        except (ConfigError, OSError) as error:
            raise RewardError(f"no process could be started in place of one that ended: {error}") from error
        finally:
            self._idle.put(worker)
        self._late = self._late + 1 if answer.late else 0
        if answer.error:
            raise RewardError(answer.error)
        reward = answer.reward + (response.environment_reward or 0.0)
        if flaw := flaw_of_reward(reward):
            raise RewardError(f"with that of its environment {flaw}")
        return reward


class _Died(Exception):
    """A reward process ended by itself."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class _Worker:
    """One reward process; started again when it is asked after its end."""

    def __init__(self, reference: str, base_dir: Path) -> None:
        self._command = [sys.executable, "-m", "seer_rl.reward_worker", reference, str(base_dir)]
        self._reference = reference
        self._process: ChildProcess | None = None
        self.given_up = False

    def start(self) -> None:
        """Start the process and wait until it has imported the function.

        Raises:
            ConfigError: it has not.
        """
        self._process = ChildProcess(self._command, pipes=True)
        if self.given_up:
            self._process.kill()
        try:
            answer = self._answer(START_S)
        except _Died as died:
            raise ConfigError(
                f"the process of reward {quote(self._reference)} ended with exit status {died.status}"
                " before it was up"
            ) from died
        except TimeoutError:
            self.kill()
            raise ConfigError(
                f"reward {quote(self._reference)} was not imported within {START_S:g} s"
            ) from None
        if answer.error:
            self.kill()
            raise ConfigError(answer.error)

    def ask(self, line: bytes, timeout_s: float) -> RewardAnswer:
        """Return the answer; where there is none in time, the process is killed."""
        if self._process is None:
            self.start()
        assert self._process is not None
        try:
            # A process that waits for its next line reads; one that does not is dead.
            with suppress(BrokenPipeError):
                _write(self._process.stdin.fileno(), line + b"\n")
            return self._answer(timeout_s)
        except TimeoutError:
            self.kill()
            return RewardAnswer(error=f"it took longer than {timeout_s:g} s", late=True)
        except msgspec.MsgspecError as error:
            self.kill()
            return RewardAnswer(error=f"its process sent what is no answer: {one_line(error)}")

    def _answer(self, timeout_s: float) -> RewardAnswer:
        process = self._process
        assert process is not None
        end = time.monotonic() + timeout_s
        received = b""
        while not received.endswith(b"\n"):
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                status = process.wait(max(0.0, end - time.monotonic()))
                if status is None:  # it has closed its descriptors and runs on
                    raise TimeoutError
                self.kill()
                raise _Died(status)
            received += part
        return msgspec.json.decode(received, type=RewardAnswer)

    def give_up(self) -> None:
        """Let the thread that waits for an answer see the process end; from any thread."""
        self.given_up = True
        if (process := self._process) is not None:
            process.kill()

    def kill(self) -> None:
        """End the process and what it has started."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.end()


def _write(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
