"""Items of OpenAI's Responses: an input's as messages of a chat, and an output's as they grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import attrs

from seer_server.choices import new_call_id
from seer_server.parsing import Reading, ToolCall
from seer_server.unsupported_fields import FieldError

__all__ = ["OutputItems", "messages_of"]


def messages_of(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of an input's items.

    As in vLLM, reasoning, text and calls that follow each other are one message of the assistant's.

    Raises:
        FieldError: an item is of another kind.
    """
    messages: list[dict[str, Any]] = []
    for item in items:
        kind, role = item.get("type", "message"), item.get("role")
        if kind == "function_call_output":
            output = {"content": item.get("output"), "tool_call_id": item.get("call_id")}
            messages.append({"role": "tool", **output})
        elif kind == "message" and isinstance(role, str) and role != "assistant":
            messages.append({"role": role, "content": item.get("content")})
        else:
            name, value = _part_of(kind, role, item)
            last = messages[-1] if messages and messages[-1]["role"] == "assistant" else {}
            if name == "tool_calls" and last:
                last.setdefault(name, []).extend(value)
            elif last and last.get(name) is None:
                last[name] = value
            else:
                messages.append({"role": "assistant", name: value})
    return messages


def _part_of(kind: Any, role: Any, item: dict[str, Any]) -> tuple[str, Any]:
    """Return the field of an assistant's message that an item is, and its value."""
    if kind == "message" and role == "assistant":
        return "content", item.get("content")
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        return "tool_calls", [{"id": item.get("call_id"), "type": "function", "function": function}]
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary")
        first = parts[0] if isinstance(parts, list) and parts else None
        return "reasoning", str(first.get("text") or "") if isinstance(first, dict) else ""
    raise FieldError("input has an item that is no message and no call; leave it out", "input")


Kind = Literal["reasoning", "message", "function_call"]
PREFIXES: dict[Kind, str] = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
CONTENT: dict[Kind, str] = {"reasoning": "reasoning_text", "message": "output_text"}


@attrs.define(eq=False)
class _Item:
    kind: Kind
    id: str
    place: int
    call: ToolCall | None = None
    status: str = "in_progress"
    text: list[str] = attrs.Factory(list)
    scores: list[dict[str, Any]] = attrs.Factory(list)
    """The log-probs of a message's tokens."""
    sent: int = 0
    """How many of them are in events of pieces."""

    @property
    def plain(self) -> dict[str, Any]:
        """The item as it is so far."""
        text, head = "".join(self.text), {"type": self.kind, "id": self.id}
        if self.call is not None:
            call = {"call_id": self.call.id, "name": self.call.name, "arguments": text}
            return {**head, **call, "status": self.status}
        begun = self.status == "in_progress"
        content = [] if begun else [self.part(text)]
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": content, "status": self.status}
        return {**head, "role": "assistant", "status": self.status, "content": content}

    def part(self, text: str) -> dict[str, Any]:
        """Return content of this kind."""
        more: dict[str, Any] = {}
        if self.kind == "message":
            more = {"annotations": [], "logprobs": self.scores[:]}
        return {"type": CONTENT[self.kind], "text": text, **more}


class OutputItems:
    """The items of an output: one grows at a time.

    Events are pairs, of a name and the other fields.
    """

    def __init__(self, code: str) -> None:
        self._code = code
        self._items: dict[tuple[Kind, int], _Item] = {}
        self._open: _Item | None = None

    @property
    def plain(self) -> list[dict[str, Any]]:
        """The items as they are so far."""
        return [each.plain for each in self._items.values()]

    def add(
        self, reading: Reading, scores: Sequence[dict[str, Any]] = (), *, plain: bool = False
    ) -> list[tuple[str, dict[str, Any]]]:
        """Add the next piece; return its events.  ``plain`` text begins a message even if it is empty.

        ``scores`` are the log-probs of the piece's tokens, of which a message has those of pieces with text.
        """
        events = []
        if reading.reasoning:
            events += self._grow("reasoning", reading.reasoning)
        if reading.content or plain:
            events += self._grow("message", reading.content or "", scores=scores)
        for call in reading.calls:
            events += self._grow("function_call", call.arguments, call)
        return events

    def close(self, status: str) -> list[tuple[str, dict[str, Any]]]:
        """End the output, whose last item has this status; return the events."""
        events = [] if self._items else self._grow("message", "")
        return [*events, *self._close(status)]

    def _grow(
        self, kind: Kind, text: str, call: ToolCall | None = None, scores: Sequence[dict[str, Any]] = ()
    ) -> list[tuple[str, dict[str, Any]]]:
        key = (kind, 0 if call is None else call.index)
        item, events = self._items.get(key), []
        if item is None:
            events = self._close("completed")
            place = len(self._items)
            id = f"{PREFIXES[kind]}_{self._code}" + (f"_{place}" if place else "")
            if call is not None and call.id is None:
                call = attrs.evolve(call, id=new_call_id())
            item = self._items[key] = self._open = _Item(kind, id, place, call)
            events.append(("output_item.added", {"output_index": place, "item": item.plain}))
            if call is None:
                events.append(("content_part.added", {**self._place(item), "part": item.part("")}))
        item.scores += scores
        if text:
            item.text.append(text)
            name = "function_call_arguments" if call is not None else CONTENT[kind]
            more: dict[str, Any] = {"logprobs": item.scores[item.sent :]} if kind == "message" else {}
            item.sent = len(item.scores)
            events.append((f"{name}.delta", {**self._place(item), "delta": text, **more}))
        return events

    def _close(self, status: str) -> list[tuple[str, dict[str, Any]]]:
        item, self._open = self._open, None
        if item is None:
            return []
        item.status, text = status, "".join(item.text)
        if item.call is not None:
            done = {**self._place(item), "arguments": text, "name": item.call.name}
            events = [("function_call_arguments.done", done)]
        else:
            more: dict[str, Any] = {"logprobs": item.scores} if item.kind == "message" else {}
            events = [
                (f"{CONTENT[item.kind]}.done", {**self._place(item), "text": text, **more}),
                ("content_part.done", {**self._place(item), "part": item.part(text)}),
            ]
        return [*events, ("output_item.done", {"output_index": item.place, "item": item.plain})]

    @staticmethod
    def _place(item: _Item) -> dict[str, Any]:
        place = {"item_id": item.id, "output_index": item.place}
        return place if item.call is not None else {**place, "content_index": 0}
