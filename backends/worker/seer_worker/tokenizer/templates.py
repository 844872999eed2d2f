"""Renders chat templates in the environment, and with the variables, that transformers 5 gives them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from seer_host.json_files import describe_flaw

from seer_core.errors import ConfigError, PromptError
from seer_worker.tokenizer.generation_tag import Generation
from seer_worker.tokenizer.reading import REMEDY, TokenizerReading

__all__ = ["ChatTemplates"]


class ChatTemplates:
    """The chat templates of a reading of the tokenizer in ``place``, which errors name."""

    def __init__(self, reading: TokenizerReading, place: object) -> None:
        self._reading, self._place = reading, place
        self._compiled: dict[str, Template] = {}

    def source(self, tools: Any = None) -> str:
        """Return the template for a chat, with ``tools`` that for tools if the model has one of its own.

        Raises:
            PromptError: there is none.
        """
        return self._reading.templates[self._name(tools)]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text of a chat.

        Raises:
            PromptError: there is no template, or ``variables`` has one that is given to every template.
            ConfigError: the template is broken.
        """
        own = {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            **self._reading.special_tokens,
        }
        further = variables or {}
        if taken := sorted(own.keys() & further.keys()):
            raise PromptError(f"chat_template_kwargs cannot set {', '.join(taken)}; leave them out")
        given = {"tools": None, "documents": None, **own, **further}
        name = self._name(given["tools"])
        if name not in self._compiled:
            self._compiled[name] = self._compile(self._reading.templates[name])
        return str(self._compiled[name].render(**given))

    def _name(self, tools: Any) -> str:
        templates = self._reading.templates
        if not templates:
            raise PromptError(f"{self._place} has no chat template; give prompts as text or token ids")
        if tools is not None and "tool_use" in templates:
            return "tool_use"
        if "default" not in templates:
            raise PromptError(
                f"{self._place} has chat templates named {', '.join(templates)}, and none named default;"
                " give prompts as text or token ids"
            )
        return "default"

    def _compile(self, source: str) -> Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            return environment.from_string(source)
        # Jinja raises TemplateSyntaxError, or what Python's own compiler makes of what it generates.
        except Exception as error:
            raise ConfigError(
                f"{self._place}: its chat template is broken: {describe_flaw(error)}; {REMEDY}"
            ) from error


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers' filter does, without escaping it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
