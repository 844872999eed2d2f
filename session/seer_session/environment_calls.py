"""Environments at work: turns go to them, many at once, and each answer comes back within its limit."""

from __future__ import annotations

import asyncio
import builtins
import inspect
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count, islice
from numbers import Real
from operator import index, itemgetter
from typing import Any, Protocol, runtime_checkable

import attrs
import msgspec
import structlog
from seer_host.images import PlacedImages
from seer_host.tables import TurnsTable
from seer_host.threads import in_thread

from seer_core import errors
from seer_core.error_origin import describe_error, is_ctrl_c, is_sentence, one_line, shown
from seer_core.errors import EngineError, PromptError, SeerError, name_of
from seer_core.ports.contracts import implemented
from seer_core.ports.engine import Clock, HeldClock, ModelInfo, Tokenizer
from seer_core.ports.extension import HeldResponses
from seer_session.contained import contain_tasks
from seer_session.environment import AnsweredTurn, Environment, EnvironmentAnswer, ModelTurn, Trajectory
from seer_session.images import MOST_IMAGES, ImageReader, image_parts, names_images, place_images
from seer_session.long_texts import LONG_TEXT, characters_of, cut, end_beyond, text_of
from seer_session.turns import answered_turns, trajectory_of, turn_of

__all__ = ["EncodedAnswer", "EnvironmentCalls", "Question"]

log = structlog.get_logger("seer")

LARGEST_REWARD = 1e300
"""The most of a turn's reward, up or down, so that the sum of a response's is finite."""

HANGING = 2
"""Threads of plain methods that there may be for each turn that is worked on at once: half may hang."""


class _Raised(Exception):
    """A plain method of the environment raised what its text describes."""


OWN_ERRORS = (
    _Raised,
    *(each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, SeerError)),
)
"""Classes of Seer's, whose text is a reason as it is."""
PLAIN_ERRORS = (
    asyncio.CancelledError,
    *(each for each in vars(builtins).values() if isinstance(each, type) and issubclass(each, BaseException)),
)
"""Classes whose text is that of their arguments, and no code of others."""


@runtime_checkable
class ReplyTokenizer(Protocol):
    """The further method of a ``Tokenizer`` that can append messages to what the model has written."""

    def encode_reply(
        self,
        messages: Sequence[Mapping[str, Any]],
        written: Sequence[int],
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids that follow the model's message ``written``: messages and the generation prompt.

        They begin with what the template puts behind a message of the assistant's, but for an end token that
        the model has written itself.

        Raises:
            PromptError: with the messages, the template writes another text before them.
        """
        ...


class EncodedAnswer(msgspec.Struct, frozen=True):
    """An environment's answer in tokens, not yet cut to the room that the response has.

    ``images`` are those of the whole response so far, if the answer has any.
    """

    token_ids: list[int]
    reward: float | None
    done: bool
    images: PlacedImages | None = None


class Question(msgspec.Struct, frozen=True):
    """A turn that its environment is asked about; ``earlier`` returns the turns answered before it.

    ``tokens`` counts those of prompt and response, and ``attachments`` are the further fields of its chunks.
    """

    trajectory: Trajectory
    turn: ModelTurn
    earlier: Callable[[], Sequence[AnsweredTurn]]
    tokens: int = 0
    attachments: Mapping[str, Any] = {}


@attrs.define(eq=False)
class _Call:
    """A question that has not been answered, the environment's work on it, and how to give it up."""

    number: int
    question: Question
    working: bool = False
    given_up: bool = False
    work: asyncio.Task[tuple[EncodedAnswer | str, float]] | None = None
    cancel: Callable[[], None] = lambda: None
    release: Callable[[], None] = lambda: None


class EnvironmentCalls:
    """Asks one environment about turns: those that it works on at once, and those that wait for that.

    A clock that can be held stands still while the environment's own code runs, and then takes all answers in
    the order of the questions.  So a virtual run does not depend on how long that code takes.  Long answers
    are encoded beside the event loop, one at a time, as far as there is room for them.

    Plain methods that never return leave their threads behind.  Once these are too many, no further one is
    begun, and turns fail at once.

    What the environment raises, of any class, is the reason why its response failed.  Its task is cancelled
    from here alone: any other ``CancelledError`` comes from its own code, such as an MCP client's.
    """

    def __init__(
        self,
        environment: Environment,
        settings: TurnsTable,
        clock: Clock,
        model: ModelInfo,
        tokenizer: Tokenizer | None,
        responses: HeldResponses,
        image_roots: Sequence[str] = (),
    ) -> None:
        self._environment = environment
        self._settings = settings
        self._clock = clock
        self._model = model
        self._tokenizer = tokenizer
        self._image_roots = image_roots
        self._responses = responses
        self._decode = None if tokenizer is None else tokenizer.decode
        self._calls: dict[str, _Call] = {}
        self._waiting: deque[_Call] = deque()
        self._numbers = count()
        self._working = 0
        self._settled: list[tuple[int, _Call, EncodedAnswer | str, float]] = []
        self._begun: dict[str, Trajectory] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._encoding = asyncio.Lock()
        self._threads: set[object] = set()
        self._reset = implemented(environment, "reset")
        self._close = implemented(environment, "close")

    def held(self, request_id: str) -> None:
        """Ask about the turn that a response has just written."""
        response = self._responses.held(request_id)
        earlier = partial(answered_turns, response, self._decode)
        turn, tokens = turn_of(response, self._decode), len(response.token_ids)
        tokens += len(response.group.prompt_token_ids)
        trajectory = trajectory_of(request_id, response)
        self.ask(Question(trajectory, turn, earlier, tokens, response.attachments))

    def ask(self, question: Question) -> None:
        """Ask about a turn, now or once fewer are worked on; the answer is never taken at once."""
        call = self._calls[question.trajectory.request_id] = _Call(next(self._numbers), question)
        self._waiting.append(call)
        self._begin_next()

    def over(self, request_id: str) -> None:
        """Drop the turn of a response that is over, if it waits for an answer, and close its trajectory."""
        call = self._calls.pop(request_id, None)
        if call is not None:
            self._give_up(call)
            self._begin_next()
        trajectory = self._begun.pop(request_id, None)
        if trajectory is not None and self._close is not None:
            closing = asyncio.ensure_future(self._closed(trajectory))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def stop(self) -> None:
        """Drop all turns, and close all trajectories."""
        self._waiting.clear()
        for request_id in dict.fromkeys([*self._begun, *self._calls]):  # a set has an order by chance
            self.over(request_id)

    async def closed(self) -> None:
        """Wait until the trajectories that are over have been closed."""
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _give_up(self, call: _Call) -> None:
        if call in self._waiting:
            self._waiting.remove(call)
        call.cancel()
        _cancel_work(call)
        if call.working:
            self._worked(call)
        call.release()

    def _begin_next(self) -> None:
        while self._waiting and len(self._calls) - len(self._waiting) < self._settings.at_once:
            call = self._waiting.popleft()
            if isinstance(self._clock, HeldClock):
                call.release = self._clock.hold()
            call.working = True
            self._working += 1
            call.work = asyncio.ensure_future(self._answer(call))
            late = partial(self._settle, call, self._late())
            limit = asyncio.get_running_loop().call_later(self._settings.timeout_s, late)
            call.cancel = limit.cancel
            call.work.add_done_callback(partial(self._answered, call))

    def _answered(self, call: _Call, work: asyncio.Task[tuple[EncodedAnswer | str, float]]) -> None:
        """Take what the environment's work has come to, unless it was given up."""
        if work.cancelled():
            self._settle(call, "its environment cancelled the task in which it was called")
        elif (error := work.exception()) is not None:  # Ctrl-C
            self._settle(call, self._reason(error))
        else:
            self._settle(call, *work.result())

    def _settle(self, call: _Call, outcome: EncodedAnswer | str, delay_s: float = 0.0) -> None:
        """End a call with its outcome, after a delay if the answer has one; one that has ended stays so."""
        if self._calls.get(call.question.trajectory.request_id) is not call or not call.working:
            return
        call.cancel()
        limit_s = self._settings.timeout_s
        if delay_s > limit_s:
            delay_s, outcome = limit_s, self._late()
        self._settled.append((call.number, call, outcome, delay_s))
        self._worked(call)

    def _worked(self, call: _Call) -> None:
        """Pass on what has been settled: at once, or where the clock is held once nothing works any more."""
        call.working = False
        self._working -= 1
        if self._working and isinstance(self._clock, HeldClock):
            return
        settled, self._settled = sorted(self._settled, key=itemgetter(0)), []
        for _, each, outcome, delay_s in settled:
            if self._calls.get(each.question.trajectory.request_id) is not each:  # given up since
                continue
            if delay_s:
                due_s = self._clock.now() + delay_s
                each.cancel = self._clock.call_at(due_s, partial(self._end, each, outcome))
            else:
                self._end(each, outcome)
        for _, each, _, _ in settled:
            each.release()

    def _end(self, call: _Call, outcome: EncodedAnswer | str) -> None:
        request_id = call.question.trajectory.request_id
        del self._calls[request_id]
        _cancel_work(call)  # one that is late, and may not heed it
        self._begin_next()
        if isinstance(outcome, str):
            log.warning("environment_failed", request=request_id, reason=outcome)
            self._responses.extension_failed(request_id, outcome)
        else:
            new = outcome.token_ids, outcome.reward, outcome.done, outcome.images
            self._responses.extend(request_id, *new)

    async def _answer(self, call: _Call) -> tuple[EncodedAnswer | str, float]:
        """Return an answer, or why there is none, and its delay in seconds."""
        contain_tasks()
        question = call.question
        trajectory = question.trajectory
        try:
            if trajectory.request_id not in self._begun:
                self._begun[trajectory.request_id] = trajectory
                if self._reset is not None:
                    await self._bounded(self._reset, trajectory, question.earlier())
            answer = await self._bounded(self._environment.step, trajectory, question.turn)
            if _characters(answer) < LONG_TEXT and not _names_images(answer):
                return self._encoded(answer, question), _delay_of(answer)
            async with self._encoding:
                encoded = await in_thread(None, self._encoded, answer, question, name="seer-encoding")
            return encoded, _delay_of(answer)
        except BaseException as error:
            if is_ctrl_c(error) or (call.given_up and type(error) is asyncio.CancelledError):
                raise
            return await self._why(error), 0.0

    async def _bounded(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Return the answer of a method; raises EngineError if too many plain ones have not returned."""
        if inspect.iscoroutinefunction(method):
            return await method(*arguments)
        threads, me = self._threads, object()
        if len(threads) >= HANGING * self._settings.at_once:
            raise EngineError(
                f"{len(threads):,} calls of its environment have not returned, so no other is begun; give its"
                " tools limits of time, or make its methods coroutines"
            )

        def call() -> Any:
            threads.add(me)
            try:
                return method(*arguments)
            except SeerError:
                raise
            except BaseException as error:
                # Here, for the text of an error may take as long as the method.
                raise _Raised(describe_error(error, self._environment)) from error
            finally:
                threads.discard(me)

        return await _called(call)

    async def _closed(self, trajectory: Trajectory) -> None:
        assert self._close is not None
        contain_tasks()
        limit = asyncio.timeout(self._settings.timeout_s)
        try:
            async with limit:
                await _called(self._close, trajectory)
        except BaseException as error:
            if is_ctrl_c(error):
                raise
            reason = self._late()
            if not limit.expired():
                with suppress(TimeoutError):
                    reason = await asyncio.wait_for(self._why(error), self._settings.timeout_s)
            log.warning("environment_close_failed", request=trajectory.request_id, reason=reason)

    async def _why(self, error: BaseException) -> str:
        """Return the reason; a text that is code of others, and may hang, is read beside the event loop."""
        if _has_plain_text(error):
            return self._reason(error)
        try:
            reason: str = await self._bounded(self._reason, error)
        except EngineError as too_many:
            kind = name_of(type(error))
            return f"its environment raised {kind}, and its text is not read: {too_many}"
        return reason

    def _reason(self, error: BaseException) -> str:
        """Return, in words, why the environment has failed."""
        if type(error) is _Raised:
            return f"its environment raised {error}"
        if is_sentence(error):
            return one_line(error)
        return f"its environment raised {describe_error(error, self._environment)}"

    def _late(self) -> str:
        return (
            f"its environment took more than {self._settings.timeout_s:g} s for a turn"
            " ([seer.turns].timeout_s)"
        )

    def _encoded(self, answer: Any, question: Question) -> EncodedAnswer:
        """Return an answer in tokens; raises SeerError for one that is none."""
        if not isinstance(answer, EnvironmentAnswer):
            raise PromptError(f"its environment answered {shown(answer)}, which is no EnvironmentAnswer")
        reward = None if answer.reward is None else _reward_of(answer.reward)
        most = question.turn.left_tokens + 1  # one token beyond the room says as much as a million
        images = None
        if _names_images(answer):
            found, images = self._with_images(answer, question)
        else:
            found = self._token_ids(answer, question.turn)
        token_ids = [self._token(each) for each in islice(found, most)]
        if not token_ids and not answer.done:
            raise PromptError("its environment answered no token, and the response is not done")
        return EncodedAnswer(token_ids, reward, bool(answer.done), images)

    def _with_images(
        self, answer: EnvironmentAnswer, question: Question
    ) -> tuple[Sequence[int], PlacedImages | None]:
        """Return the tokens of an answer with images, and all of the response's that fit whole."""
        before, left = question.attachments, question.turn.left_tokens
        if not self._model.takes_images:
            raise PromptError("its environment answered images, which this engine does not take")
        if before and not isinstance(before, PlacedImages):
            raise PromptError("its environment answered images, and the prompt has attachments")
        try:
            messages, parts = image_parts(answer.messages or ())
            if answer.messages is not None:
                answer = msgspec.structs.replace(answer, messages=messages)
            images = ImageReader(self._image_roots).all(parts, answer.images)
            found = self._token_ids(answer, question.turn)
            token_ids, new = place_images(
                [self._token(each) for each in islice(found, self._model.max_model_tokens)],
                images,
                self._tokenizer,
            )
        except PromptError as error:
            raise PromptError(f"its environment's answer: {error}") from error
        fitting = [(image, at, tokens) for image, at, tokens in new.placed() if at + tokens <= left]
        new = PlacedImages([image for image, _, _ in fitting], [(at, tokens) for _, at, tokens in fitting])
        placed = PlacedImages.joined(before, new, question.tokens)
        if len(placed.digests) > MOST_IMAGES:
            raise PromptError(
                f"with its environment's answer the response has {len(placed.digests):,} images; it may have"
                f" {MOST_IMAGES}"
            )
        return token_ids, placed if fitting else None

    def _token(self, value: Any) -> int:
        """Return a token of an answer, also of numpy's type; raises PromptError for what is none."""
        last = self._model.vocab_size - 1
        with suppress(TypeError):
            if not isinstance(value, bool) and 0 <= index(value) <= last:
                return index(value)
        raise PromptError(f"its environment answered token {shown(value)}; the vocabulary is 0 to {last}")

    def _token_ids(self, answer: EnvironmentAnswer, turn: ModelTurn) -> Sequence[int]:
        parts = ("token_ids", "text", "messages")
        given = [name for name in parts if getattr(answer, name) is not None]
        if len(given) > 1:
            raise PromptError(f"its environment answered {' and '.join(given)}; give one of them")
        if answer.token_ids is not None:
            return answer.token_ids
        if not given:
            return []
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise PromptError(f"its environment answered {given[0]}, and this engine has no tokenizer")
        if answer.text is not None:
            return _encoded_text(answer.text, tokenizer, turn.left_tokens)
        assert answer.messages is not None
        if not isinstance(tokenizer, ReplyTokenizer):
            raise PromptError(
                "its environment answered messages, which this engine's tokenizer cannot append"
            )
        try:
            messages = _shortened(answer.messages, tokenizer, turn.left_tokens)
            return tokenizer.encode_reply(messages, turn.token_ids, answer.chat_template_kwargs)
        except SeerError:
            raise
        except Exception as error:
            raise PromptError(
                f"the chat template refused its environment's messages: {one_line(error)}"
            ) from error


def _has_plain_text(error: BaseException) -> bool:
    """Return whether the text of an error is that of its arguments, and so cannot hang."""
    if any(type(error) is each for each in PLAIN_ERRORS):
        if error.__cause__ is not None:
            return False
    elif not any(type(error) is each for each in OWN_ERRORS):
        return False
    return all(type(each) is str for each in error.args)


def _cancel_work(call: _Call) -> None:
    call.given_up = True
    if call.work is not None:
        call.work.cancel()


def _names_images(answer: Any) -> bool:
    """Return whether an answer has images."""
    return isinstance(answer, EnvironmentAnswer) and names_images(
        {"messages": answer.messages, "images": answer.images}
    )


def _characters(answer: Any) -> int:
    """Return about how much text an answer has."""
    if not isinstance(answer, EnvironmentAnswer):
        return 0
    return characters_of(answer.text, answer.messages, answer.chat_template_kwargs)


def _encoded_text(text: Any, tokenizer: Tokenizer, most: int) -> Sequence[int]:
    """Return the tokens of a text, of which no more is encoded than there is surely room for."""
    if not isinstance(text, str):
        raise PromptError(f"its environment answered the text {shown(text)}, which is no string")
    try:
        return tokenizer.encode_part(text[: end_beyond(text, tokenizer, most)])
    except SeerError:
        raise
    except Exception as error:
        raise PromptError(f"the tokenizer refused its environment's text: {one_line(error)}") from error


def _shortened(
    messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, most: int
) -> Sequence[Mapping[str, Any]]:
    """Return messages without the text beyond their first ``most`` tokens, which has no room anyhow."""
    left = end_beyond(text_of(messages), tokenizer, most)
    if left is None:
        return messages
    short = []
    for message in messages:
        content, left = cut(message.get("content"), left)
        short.append({**message, "content": content})
    return short


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _reward_of(value: Any) -> float:
    """Return the reward of a turn; raises PromptError for what is none."""
    reward = math.nan
    if _is_number(value):
        with suppress(OverflowError):  # an integer of hundreds of digits
            reward = float(value)
    if not abs(reward) <= LARGEST_REWARD:
        raise PromptError(
            f"its environment gave the reward {shown(value)}; a reward is a finite number, from"
            f" {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}"
        )
    return reward


def _delay_of(answer: Any) -> float:
    """Return an answer's delay in seconds; what is no number of seconds is none."""
    delay_s = getattr(answer, "delay_s", 0.0)
    if not _is_number(delay_s) or not delay_s > 0:
        return 0.0
    try:
        return float(delay_s)
    except OverflowError:
        return math.inf


async def _called(method: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer of a coroutine function, or of a plain one that runs in a thread of its own."""
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)
    answer = await in_thread(None, method, *arguments, name="seer-environment")
    return await answer if inspect.isawaitable(answer) else answer
