"""docs/reference/http-api.md: the routes of the server, the bodies that they read and their answers."""

from __future__ import annotations

import json

from seer_server.responses_api import NEUTRAL as RESPONSES_NEUTRAL
from seer_server.servers import CONTROL_CALLS
from seer_server.tokens_api import NEUTRAL as TOKENS_NEUTRAL
from seer_server.tokens_api import NEUTRAL_SAMPLING as TOKENS_SAMPLING_NEUTRAL
from seer_server.unsupported_fields import IGNORED, IN_CHATS, IN_COMPLETIONS, NEUTRAL

from reference.http_answers import LINES, OPERATIONS, STATUSES
from reference.openapi import routes
from reference.page import Page, markdown

__all__ = ["page"]

INTRODUCTION = """\
`seer serve` speaks JSON over HTTP. `make reference` writes the same as OpenAPI 3.1 into `build/openapi.json`.
A server with a token answers only requests with `Authorization: Bearer TOKEN`, or with the token as the
password of `Authorization: Basic`; `/health` needs none, and with `--open-completions`
neither do completions, chats and models. A route that needs no token, except `/health`, is answered only to
and from localhost. An unknown key of a body is refused."""


def page() -> Page:
    """Return the page."""
    found = Page("http-api.md", "HTTP API", INTRODUCTION)
    for (method, path), text in routes().items():
        found.heading(2, f"`{method} {path}`")
        if not text:
            found.flaws.append(f"{method} {path} has no docstring: give its handler one")
        found.add(markdown(text))
        operation = OPERATIONS.get((method, path))
        if operation is None:
            found.flaws.append(f"{method} {path} is missing in reference.http_answers.OPERATIONS: add it")
            continue
        if operation.body is not None:
            found.add("Query:" if operation.query else "Body:")
            for field in found.fields(operation.body):
                if field.struct is not None:
                    found.add(f"Keys of `{field.name}`. {markdown(field.struct.__doc__ or '')}")
                    found.fields(field.struct)
        if operation.query:
            found.add("The body is one or more files of safetensors, one right after the other.")
        found.add(f"Answer: {operation.answer}")
    found.flaws += [
        f"reference.http_answers.OPERATIONS has {method} {path}, and the server does not: remove it"
        for method, path in OPERATIONS.keys() - routes().keys()
    ]
    found.heading(2, "Control calls of servers")
    found.add(
        "Where engines are servers that run already, these calls are passed on to all of them, and the answer"
        " is theirs. On other engines they are a 404. [In front of servers](../guides/in-front-of-servers.md)"
        " says what Seer does besides."
    )
    found.table(
        ["call", "effect"],
        [(f"`{call.method} {path}`", call.effect.value) for path, call in sorted(CONTROL_CALLS.items())],
    )
    found.heading(2, "Fields that change nothing")
    found.add(
        "Clients of OpenAI and vLLM send fields that Seer does not have. Completions, chats,"
        " responses and `/inference/v1/generate`, tokens for short, take them with null or a value of this"
        " table, and refuse any other. With any value they ignore "
        + ", ".join(f"`{name}`" for name in IGNORED)
        + "."
    )
    tables = (
        ("", NEUTRAL),
        ("completions", IN_COMPLETIONS),
        ("chats", IN_CHATS),
        ("responses", RESPONSES_NEUTRAL),
        ("tokens", TOKENS_NEUTRAL | TOKENS_SAMPLING_NEUTRAL),
    )
    found.table(
        ["field", "values", "only in"],
        [
            (f"`{name}`", ", ".join(f"`{json.dumps(value)}`" for value in values) or "none", kind)
            for kind, fields in tables
            for name, values in fields.items()
        ],
    )
    found.heading(2, "Lines of a stream")
    found.add("A stream has the type `application/x-ndjson`: one JSON object a line, with one of these keys.")
    found.table(["key", "meaning"], [(f"`{name}`", text) for name, text in LINES.items()])
    found.heading(2, "Errors")
    found.add(
        'An error is `{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}`. `param` names the'
        " field at fault, where it is one field's, and is null otherwise."
    )
    found.table(["status", "meaning"], [(str(code), text) for code, text in STATUSES.items()])
    return found
