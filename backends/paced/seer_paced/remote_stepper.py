"""A stepper in another process, turn by turn: for an engine that this process's environment lacks.

A turn is messages as workers get them, before each chunk its tokens, and at last a ``Turn``; the answer is a
``TurnResult``.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from math import ceil
from typing import Any

import structlog
from msgspec import Struct
from seer_host.frames import Frames, encode
from seer_worker.process.adapter import ADAPTER, ScriptedTokens
from seer_worker.wire import Failed, Fatal, FromWorker, Ready, Start, Submit, ToWorker

from seer_core.errors import EngineError
from seer_core.model import InstanceInfo
from seer_core.ports.engine import ChunkJob
from seer_paced.script import ScriptError, TokenScript
from seer_paced.stepper import LocalStepper, Stepper, TurnResult

__all__ = ["RemoteStepper", "serve"]

log = structlog.get_logger("seer")

READ_BYTES = 1 << 20


class Scripted(Struct, frozen=True, tag=True):
    """The tokens of a chunk that this turn submits."""

    job_id: str
    tokens: ScriptedTokens


class Turn(Struct, frozen=True, tag=True):
    """Take a turn with the messages so far, at this virtual time; answered by ``TurnResult``."""

    now_s: float
    step: bool


class RemoteStepper:
    """The end of the socket where time and script are.

    Args:
        connection: a process that runs ``serve`` has the other end.
        start: the instance; its class takes a clock and a script besides.
        script: the tokens of chunks.
        start_s: how long the instance may take to be made.
        answer_s: how long it may take for a turn.

    Raises:
        EngineError: it could not be made.
    """

    def __init__(
        self, connection: socket.socket, start: Start, script: TokenScript, start_s: float, answer_s: float
    ) -> None:
        self._connection = connection
        self._script = script
        self._answers = _messages(connection, FromWorker | TurnResult)
        connection.settimeout(start_s)
        ready = self._ask([encode(start)])
        assert isinstance(ready, Ready)
        self.info: InstanceInfo = ready.info
        connection.settimeout(answer_s)

    def turn(self, now_s: float, messages: Sequence[ToWorker], *, step: bool) -> TurnResult:
        """As ``Stepper.turn``.

        Raises:
            EngineError: the process is gone, does not answer, or sends why it cannot go on.
        """
        frames, refused = [], []
        for message in messages:
            if isinstance(message, Submit):
                try:
                    tokens = self._script.tokens_of(message.job)
                    frames.append(encode(Scripted(message.job.id, tokens)))
                except ScriptError as error:
                    refused.append(Failed(message.job.id, str(error)))
                    continue
            frames.append(encode(message))
        result = self._ask([*frames, encode(Turn(now_s, step))])
        assert isinstance(result, TurnResult)
        result.answers[:0] = refused
        return result

    def close(self) -> None:
        """Let the process end."""
        self._connection.close()

    def _ask(self, frames: Sequence[bytes]) -> Any:
        try:
            self._connection.sendall(b"".join(frames))
            answer = next(self._answers, None)
        except TimeoutError as error:
            raise EngineError(f"its process sent nothing for {self._connection.gettimeout():g} s") from error
        except OSError as error:
            raise EngineError(f"its process is gone: {error}") from error
        if answer is None:
            raise EngineError("its process is gone")
        if isinstance(answer, Fatal):
            raise EngineError(answer.reason)
        return answer


def serve(connection: socket.socket, alarm: Callable[[int], object] = lambda seconds: None) -> None:
    """Make the instance that the first message names, and take turns until the other end closes.

    ``alarm`` is called with the seconds that a turn may take, when it begins, and with 0 when it is over.
    """
    script = _SentScript()
    taken: list[ToWorker] = []
    stepper: Stepper | None = None
    limit_s = 0
    try:
        for message in _messages(connection, ToWorker | Scripted | Turn):
            match message:
                case Start():
                    # Until then the other end may still wait for the answer.
                    limit_s = ceil(message.settings["worker"]["silence_timeout_s"]) + 1
                    stepper = _make(message, script)
                    connection.sendall(encode(Ready(stepper.info)))
                case Scripted(job_id, tokens):
                    script.chunks[job_id] = tokens
                case Turn(now_s, step):
                    assert stepper is not None
                    alarm(limit_s)
                    result = stepper.turn(now_s, taken, step=step)
                    alarm(0)
                    connection.sendall(encode(result))
                    taken.clear()
                    script.chunks.clear()
                case _:
                    taken.append(message)
    except ConnectionError:
        pass
    except Exception as error:
        log.exception("stepper_failed")
        connection.sendall(encode(Fatal(f"{type(error).__name__}: {error}")))
    finally:
        if stepper is not None:
            stepper.close()


class _SentScript:
    """The tokens that the other end has sent for the chunks of a turn."""

    has_text = False

    def __init__(self) -> None:
        self.chunks: dict[str, ScriptedTokens] = {}

    def tokens_of(self, job: ChunkJob) -> ScriptedTokens:
        return self.chunks[job.id]


def _make(start: Start, script: TokenScript) -> Stepper:
    make: Any = ADAPTER.load(start.instance)
    interval_s = start.settings["report_interval_s"]
    return LocalStepper(lambda clock: make(start, clock, script), start, interval_s)


def _messages(connection: socket.socket, kind: Any) -> Iterator[Any]:
    frames: Frames[Any] = Frames(kind)
    while data := connection.recv(READ_BYTES):
        yield from frames.feed(data)
