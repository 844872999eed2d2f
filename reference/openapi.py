"""build/openapi.json: the server's routes as OpenAPI 3.1, from the application itself."""

from __future__ import annotations

import inspect
import json
import re
from types import SimpleNamespace
from typing import Any

import msgspec
from seer_server.app import make_app
from seer_server.servers import ControlRoute
from starlette.routing import Route

from reference.fields import meanings_of
from reference.http_answers import JSON, OPERATIONS, STATUSES, Operation
from reference.packages import version
from reference.page import ROOT

__all__ = ["document", "routes", "write"]

ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": ["invalid_request_error", "server_error"]},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


def routes() -> dict[tuple[str, str], str]:
    """Return the docstring of each route of the application, by method and path."""
    app = make_app(lambda observers: SimpleNamespace())  # type: ignore[arg-type, return-value]
    return {
        (method, re.sub(r":\w+}", "}", route.path)): inspect.getdoc(route.endpoint) or ""
        for route in app.routes
        if isinstance(route, Route) and not isinstance(route, ControlRoute)
        for method in sorted((route.methods or {"GET"}) - {"HEAD"})
    }


def write() -> None:
    """Write the document."""
    file = ROOT / "build" / "openapi.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(document(), indent=2) + "\n")


def document() -> dict[str, Any]:
    """Return the document."""
    bodies = [each.body for each in OPERATIONS.values() if each.body is not None]
    _, schemas = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    structs = {struct.__name__: struct for struct in _all_structs(bodies)}
    for name, schema in schemas.items():
        if name in structs:
            schema["description"] = inspect.getdoc(structs[name])
            meanings = meanings_of(structs[name])
            for field, inner in schema.get("properties", {}).items():
                inner["description"] = meanings.get(field, "")
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), text in routes().items():
        if (operation := OPERATIONS.get((method, path))) is not None:
            paths.setdefault(path, {})[method.lower()] = _operation(method, path, text, operation, schemas)
    return {
        "openapi": "3.1.1",
        "info": {
            "title": "seer serve",
            "description": "Completions and chats as OpenAI has them, whole batches, and new weights.",
            "version": version("seer-server"),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "http://127.0.0.1:8000"}],
        "security": [{"token": []}, {}],
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": ERROR},
            "responses": {
                "Error": {
                    "description": " ".join(f"{code}: {text}" for code, text in STATUSES.items()),
                    "content": {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}},
                }
            },
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(
    method: str, path: str, text: str, operation: Operation, schemas: dict[str, Any]
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "summary": text.splitlines()[0],
        "responses": {
            "200": {
                "description": operation.answer.replace("`", ""),
                **({"content": {operation.media: {"schema": operation.schema}}} if operation.schema else {}),
            },
            "default": {"$ref": "#/components/responses/Error"},
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    if operation.body is not None and operation.query:
        properties = schemas[operation.body.__name__]["properties"]
        parameters += [
            {"name": name, "in": "query", "description": each["description"], "schema": each}
            for name, each in properties.items()
        ]
        content: dict[str, Any] = {"application/octet-stream": {}}
        found["requestBody"] = {"required": True, "content": content}
    elif operation.body is not None:
        schema = {"$ref": f"#/components/schemas/{operation.body.__name__}"}
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    if parameters:
        found["parameters"] = parameters
    return found


def _all_structs(structs: list[type[msgspec.Struct]]) -> list[type]:
    """Return these structs and those that their fields hold."""
    found: list[type] = []
    for struct in structs:
        info = msgspec.inspect.type_info(struct)
        assert isinstance(info, msgspec.inspect.StructType)
        inner = [
            part.cls
            for field in info.fields
            for part in getattr(field.type, "types", (field.type,))
            if isinstance(part, msgspec.inspect.StructType)
        ]
        found += [struct, *_all_structs(inner)]
    return found
