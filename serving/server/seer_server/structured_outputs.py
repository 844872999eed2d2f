"""Forms of answers at the door: what xgrammar refuses is refused before it reaches an engine."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from seer_host.output_grammars import compile_grammar
from seer_host.threads import in_thread
from seer_session.group_checks import flaw_of_form

from seer_core.model import Completion, StructuredOutputs
from seer_server.unsupported_fields import FieldError

__all__ = ["FIELD", "FormChecks", "after_reasoning", "refusal_of"]

READ_S = 10.0
"""So long a form may take to be read."""

MOST_FORMS = 256
"""Forms that are not read anew, the newest."""


FIELD = "structured_outputs"


class FormChecks:
    """Reads forms as xgrammar does for all engines, beside the event loop, one at a time.

    Where xgrammar is not installed beside the server, engines alone refuse what is no form.
    """

    def __init__(self) -> None:
        self._read: OrderedDict[bytes, str | None] = OrderedDict()
        self._turn = asyncio.Lock()

    async def require(self, form: StructuredOutputs, field: str) -> None:
        """Refuse a form that is none.

        Raises:
            FieldError: it is none, or takes too long; ``field`` is the request's that asked for it.
        """
        try:
            key = msgspec.msgpack.encode(form, order="deterministic")
        except (OverflowError, RecursionError) as error:
            raise FieldError(f"{field} cannot be sent to engines: {error}", field) from error
        async with self._turn:
            if key not in self._read:
                self._read[key] = _misshapen(form) or flaw_of_form(form) or await self._flaw(key, form)
                if len(self._read) > MOST_FORMS:
                    self._read.popitem(last=False)
            flaw = self._read[key]
        if flaw is not None:
            raise FieldError(field + flaw.removeprefix(FIELD), field)

    async def _flaw(self, key: bytes, form: StructuredOutputs) -> str | None:
        """Return why a form is none; one that is late is left to its thread, whose answer holds then."""
        await in_thread(None, _import)  # the first time that takes seconds of its own
        reading = asyncio.ensure_future(in_thread(None, _flaw, form))
        reading.add_done_callback(partial(self._keep, key))
        try:
            return await asyncio.wait_for(asyncio.shield(reading), READ_S)
        except TimeoutError:
            return f"structured_outputs takes more than {READ_S:g} s to read; simplify it"

    def _keep(self, key: bytes, reading: asyncio.Future[str | None]) -> None:
        """Replace the answer that a form takes too long by the one that came late."""
        if not reading.cancelled() and reading.exception() is None and key in self._read:
            self._read[key] = reading.result()

    async def require_all(self, records: Iterable[Mapping[str, Any]], controls: Collection[str]) -> None:
        """Refuse records whose form is none, for engines with these controls.

        Raises:
            FieldError: a form is none, or takes too long.
        """
        if FIELD not in controls:
            return  # the engines have no forms, and refuse all
        for record in records:
            try:
                form = msgspec.convert(record.get(FIELD), StructuredOutputs | None, str_keys=True)
            except msgspec.ValidationError:
                continue  # the record is refused for it
            if form is not None:
                await self.require(form, FIELD)


def _misshapen(form: StructuredOutputs) -> str | None:
    """Return why a form cannot be looked at: it is JSON of another kind than an object."""
    for name, spec in (("json", form.json), ("structural_tag", form.structural_tag)):
        with suppress(msgspec.DecodeError, RecursionError):
            if isinstance(spec, str) and not isinstance(msgspec.json.decode(spec), dict | list):
                return f"structured_outputs.{name} is no object of JSON; give one"
    return None


def _import() -> None:
    with suppress(ImportError):
        import xgrammar  # noqa: F401


def _flaw(form: StructuredOutputs) -> str | None:
    """Return why a form is none: it is compiled as engines do, for a vocabulary of two tokens."""
    try:
        import xgrammar
    except ImportError:
        return None
    info: Any = xgrammar.TokenizerInfo([b"a", b""], stop_token_ids=[1])
    try:
        compile_grammar(form, xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False))
    except ValueError as error:
        return str(error)
    return None


def refusal_of(completions: Sequence[Completion]) -> FieldError | None:
    """Return the error for a form that engines refuse: one that takes long for their vocabulary."""
    for each in completions:
        if each.error is not None and each.error.startswith(f"{FIELD} "):
            return FieldError(each.error, FIELD)
    return None


def after_reasoning(form: StructuredOutputs, end: str | None) -> StructuredOutputs:
    """Return a form that holds behind the text that ends the reasoning; the same where there is no such text.

    vLLM lets a model reason freely too, before a form holds.
    """
    if end is None:
        return form
    reasoning = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": end}
    parts = {"type": "sequence", "elements": [reasoning, _format_of(form)]}
    tag = {"type": "structural_tag", "format": parts}
    return StructuredOutputs(structural_tag=msgspec.json.encode(tag).decode())


def _format_of(form: StructuredOutputs) -> dict[str, Any]:
    """Return a form as a part of a structural tag."""
    if form.json is not None:
        schema = msgspec.json.decode(form.json) if isinstance(form.json, str) else form.json
        return {"type": "json_schema", "json_schema": schema}
    if form.json_object:
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if form.regex is not None:
        return {"type": "regex", "pattern": form.regex}
    if form.choice is not None:
        elements = [{"type": "const_string", "value": each} for each in form.choice]
        return {"type": "or", "elements": elements}
    if form.grammar is not None:
        return {"type": "grammar", "grammar": form.grammar}
    format: dict[str, Any] = msgspec.json.decode(form.structural_tag or "{}")["format"]
    return format
