"""The text of messages that are appended to a turn of the model's own.

The chat before is not rendered again, so the model's own tokens stay. A short chat stands for it: a question,
and a turn of the assistant's that holds a mark. Behind the mark stands the text that a whole chat has there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import takewhile
from typing import Any, NamedTuple

from markupsafe import escape

from seer_core.errors import PromptError, SeerError, printable
from seer_worker.chat.messages import texts_of

__all__ = ["Render", "reply_text"]

Message = Mapping[str, Any]

Render = Callable[[Sequence[Message], bool], str]
"""Returns a chat's text, with the generation prompt or without it."""

REMEDY = "let the environment answer text or token ids"

TAG = re.compile(r"<[^<>\s]+>")
"""A word that templates put between messages, such as ``<|im_end|>``."""

OPENING_CHARACTERS = 16
"""Of what stands before the name of a function in a call, so many are looked up in the model's own text."""

UNKNOWN = "unknown"
"""Gemma's templates write this name where a message of a tool has none and no id leads to one."""

SHOWN = 200
"""Characters of a template's own error that a message quotes."""


class CallMade(NamedTuple):
    """A call that a turn may have had."""

    id: Any
    name: str | None


class _Unfit(Exception):
    """A chat in place of the one before does not say what the messages become."""


class _NameMissing(_Unfit):
    """The text depends on the name of the function that the model has called."""


def reply_text(
    messages: Sequence[Message],
    render: Render,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    written: str = "",
) -> str:
    """Return the text that follows the model's turn: its end, the messages, and the generation prompt.

    ``render`` returns the text of any chat, as for a prompt. ``written`` is the text of the model's turn with
    its special tokens; names of functions in it, or of the only one of ``tools``, are those that messages of
    the role ``tool`` answer where these have no ``name``.

    Raises:
        PromptError: the template refuses such messages, leaves the content of one out, or writes another
            text for another turn.
    """
    return _Reply(messages, render, tools or (), written).text()


class _Reply:
    def __init__(
        self, messages: Sequence[Message], render: Render, tools: Sequence[Mapping[str, Any]], written: str
    ) -> None:
        self._texts = texts_of(messages)
        self._messages, self._render, self._tools, self._written = list(messages), render, tools, written
        self._seed = sha256(repr(self._messages).encode("utf-8", "replace")).hexdigest()
        self._answers = list(takewhile(lambda each: each["role"] == "tool", self._messages))

    def text(self) -> str:
        called = self._names_written()
        flaws: list[_Unfit] = []
        for calls, messages in self._turns_with_calls(called) if called or self._answers else ():
            try:
                return self._behind_calls(calls, messages)
            except _Unfit as flaw:
                flaws.append(flaw)
        if self._nameless or not any(isinstance(each, _NameMissing) for each in flaws):
            try:
                return self._behind_text()
            except _Unfit as flaw:
                flaws.append(flaw)
        named = (each for each in flaws if isinstance(each, _NameMissing))
        raise PromptError(str(next(named, flaws[-1]))) from None

    # The two kinds of turns.

    def _behind_text(self) -> str:
        """Return what follows a turn of plain text."""
        turns = [{"role": "assistant", "content": self._mark(f"turn {each}")} for each in ("a", "bb")]
        found, other = (self._tail(each, each["content"], self._messages) for each in turns)
        if found != other:
            raise _Unfit(f"the chat template writes another text behind another turn; {REMEDY}")
        self._require_contents(found, turns[0], turns[0]["content"], self._messages)
        return found

    def _behind_calls(self, calls: Sequence[CallMade], messages: Sequence[Message]) -> str:
        """Return what follows a turn that calls functions, of which some may have no name yet."""
        found, other = (self._tail(*self._turn(calls, each), messages) for each in ("a", "bb"))
        if found != other and all(each.name for each in calls):
            raise _Unfit(f"the chat template writes another text behind another turn; {REMEDY}")
        if found != other:
            raise _NameMissing(
                "the chat template writes the name of the function that a message of the role 'tool' answers;"
                " give the message its 'name'"
            )
        turn, mark = self._turn(calls, "a")
        end = self._end_of_calls(turn, mark)
        if not found.startswith(end):
            raise _Unfit(f"the chat template writes calls in another way when messages follow; {REMEDY}")
        self._require_contents(found, turn, mark, messages)
        return found.removeprefix(end)

    def _turn(self, calls: Sequence[CallMade], variant: str) -> tuple[dict[str, Any], str]:
        """Return a turn with these calls, and the mark in the last one's arguments."""
        made = []
        for number, each in enumerate(calls):
            mark = self._mark(f"call {number} {variant}")
            name = each.name or self._mark(f"name {number} {variant}")
            call = {"type": "function", "function": {"name": name, "arguments": {"value": mark}}}
            made.append(call if each.id is None else {"id": each.id, **call})
        return {"role": "assistant", "content": None, "tool_calls": made}, mark

    def _end_of_calls(self, turn: dict[str, Any], mark: str) -> str:
        """Return the text from the mark to the end of the last call, where the end of the turn begins.

        The turn ends as one of plain text does, or else with the last tag that is no part of a call.
        """
        follower = {"role": "user", "content": self._mark("follower")}
        plain = {"role": "assistant", "content": mark}
        try:
            called, said = self._tail(turn, mark, [follower]), self._tail(plain, mark, [follower])
            if called.endswith(said):
                return called.removesuffix(said)
        except _Unfit:
            pass  # no message of the user's may follow a call
        alone = self._tail(turn, mark, [], prompted=False)
        tags = list(TAG.finditer(alone))
        if not tags:
            return alone
        last = tags[-1]
        twice = {**turn, "tool_calls": [turn["tool_calls"][0], *turn["tool_calls"]]}
        try:
            once, again = (self._chat(each, [], False).count(last[0]) for each in (turn, twice))
        except _Unfit:
            once = again = 1
        return alone if again > once else alone[: last.start()]

    # What the messages answer.

    @property
    def _nameless(self) -> bool:
        """Whether messages of tools say in no way what they answer."""
        return not any(each.get("name") or each.get("tool_call_id") for each in self._answers)

    def _turns_with_calls(
        self, called: Sequence[str]
    ) -> Iterator[tuple[Sequence[CallMade], Sequence[Message]]]:
        """Yield calls that the turn may have had, those that are most like a whole chat's first."""
        if not self._answers:
            yield [CallMade(self._mark("id"), called[-1])], self._messages
            return
        functions = [each.get("function", each) for each in self._tools if isinstance(each, Mapping)]
        declared = [each["name"] for each in functions if isinstance(each, Mapping) and "name" in each]
        names: Sequence[str | None] = [None] * len(self._answers)
        if len(called) == len(names):
            names = called
        elif len({*called} or declared) == 1:
            names = [*called, *declared][:1] * len(names)
        calls = [
            CallMade(each.get("tool_call_id"), each["name"] if isinstance(each.get("name"), str) else name)
            for each, name in zip(self._answers, names, strict=True)
        ]
        # Some templates write one call at most, and then take all answers for this one's.
        yield calls, self._messages
        yield calls[:1], self._messages
        if all(each.id is None for each in calls):
            others = [CallMade(self._mark(f"id {number}"), each.name) for number, each in enumerate(calls)]
            yield others, self._messages
            yield others[:1], self._messages
            if self._nameless:
                count = len(self._answers)
                named = [{**each, "name": UNKNOWN} for each in self._answers]
                yield others, [*named, *self._messages[count:]]

    def _names_written(self) -> list[str]:
        """Return the names of the functions that the model's own text calls, as the template writes calls."""
        if not self._written:
            return []
        name, mark = self._mark("name"), self._mark("said")
        call = {"id": self._mark("id"), "type": "function", "function": {"name": name, "arguments": {}}}
        try:
            called = self._chat({"role": "assistant", "content": None, "tool_calls": [call]}, [], False)
            said = self._chat({"role": "assistant", "content": mark}, [], False)
        except _Unfit:
            return []
        begin = next((n for n, (one, other) in enumerate(zip(called, said, strict=False)) if one != other), 0)
        for opening in called[begin:].split(name)[:-1]:
            end = opening[-OPENING_CHARACTERS:].lstrip()
            if len(end) > 2 and (found := re.findall(re.escape(end) + r"([\w.-]+)", self._written)):
                return list(found)
        return []

    # Texts, and what must stand in them.

    def _chat(self, turn: Message, messages: Sequence[Message], prompted: bool) -> str:
        question = {"role": "user", "content": self._mark("question")}
        try:
            return self._render([question, turn, *messages], prompted)
        except SeerError:
            raise
        except Exception as error:  # any, a template may do anything
            raise _Unfit(f"the chat template refused messages: {printable(str(error), SHOWN)}") from error

    def _tail(self, turn: Message, mark: str, messages: Sequence[Message], prompted: bool = True) -> str:
        """Return the text behind the mark."""
        _, found, tail = self._chat(turn, messages, prompted).partition(mark)
        if not found or mark in tail:
            raise _Unfit(f"the chat template does not write a turn of the assistant's once; {REMEDY}")
        return tail

    def _require_contents(self, tail: str, turn: Message, mark: str, messages: Sequence[Message]) -> None:
        """Refuse a text without the content of each message, in their order.

        Marks in place of the contents show that a text is not there by chance.
        """
        marks = [
            self._mark(f"content {n}") if any(map(str.strip, each)) else ""
            for n, each in enumerate(self._texts)
        ]
        marked = [
            {**each, "content": mark} if mark else each for each, mark in zip(messages, marks, strict=True)
        ]
        pattern = self._tail(turn, mark, marked)
        begin = at = 0
        for number, (content, texts) in enumerate(zip(marks, self._texts, strict=True)):
            lost = f"the chat template leaves out content of message {number}, of role"
            lost = f"{lost} {self._messages[number].get('role')!r}, behind the model's turn; {REMEDY}"
            if content:
                begin = pattern.find(content, begin)
                if begin < 0:
                    raise _Unfit(lost)
            for text in filter(None, map(str.strip, texts)):
                places = [
                    (place, len(each)) for each in _spellings(text) if (place := tail.find(each, at)) >= 0
                ]
                if not places:
                    raise _Unfit(lost)
                at = sum(min(places))

    def _mark(self, what: str) -> str:
        """Return letters and digits that no template and none of the messages has."""
        digest = sha256(f"{what}: {self._seed}".encode()).hexdigest()
        return "m" + digest[: 24 + len(what)]  # of several lengths


def _spellings(text: str) -> Iterator[str]:
    """Yield a text as templates write it: plain, in JSON, or in HTML."""
    yield text
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text)[1:-1]
    yield str(escape(text))
