"""Forms of responses, compiled by xgrammar: the same at a server's door and in engines."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from seer_core.error_origin import one_line
from seer_core.model.sampling import StructuredOutputs

__all__ = ["compile_grammar"]

ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})
"""Of strings in xgrammar's EBNF."""


WHERE = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?")
"""The time and the place in its own source that xgrammar writes before a reason."""


def compile_grammar(form: StructuredOutputs, compiler: Any) -> Any:
    """Return a form as an ``xgrammar.CompiledGrammar``, by an ``xgrammar.GrammarCompiler``.

    Raises:
        ValueError: it is no grammar.
    """
    try:
        return _compile(form, compiler)
    except Exception as error:  # the library's errors are RuntimeErrors of several kinds
        reason = WHERE.sub("", one_line(error)).rstrip(".")
        raise ValueError(f"structured_outputs is no grammar: {reason}; correct it") from error


def _compile(form: StructuredOutputs, compiler: Any) -> Any:
    if form.json is not None:
        text = form.json if isinstance(form.json, str) else msgspec.json.encode(form.json).decode()
        return compiler.compile_json_schema(text, any_whitespace=True)
    if form.json_object:
        return compiler.compile_json_schema('{"type": "object"}', any_whitespace=True)
    if form.regex is not None:
        return compiler.compile_regex(form.regex)
    if form.choice is not None:
        literals = [f'"{each.translate(ESCAPES)}"' for each in form.choice]
        return compiler.compile_grammar(f"root ::= {' | '.join(literals)}")
    if form.structural_tag is not None:
        return compiler.compile_structural_tag(form.structural_tag)
    return compiler.compile_grammar(form.grammar)
