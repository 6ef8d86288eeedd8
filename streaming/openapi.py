"""/openapi.json, made from the structs that read and write the wire and from the table that makes the routes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from .exchange import Handler
from .protocol import ErrorEnvelope

_ERRORS: Mapping[int, str] = {
    400: "The request cannot work as written; `param` names the field.",
    401: "No API key, or a wrong one.",
    404: "No such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not of the expected type.",
    429: "The queue is full; see Retry-After.",
    431: "The headers are too large.",
    500: "Our fault.",
    503: "Starting, draining, or the engine is down; see Retry-After.",
    504: "The deadline has passed.",
}


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One route: how it is called, what it reads, what it answers. Router and document are both made of it."""

    method: str
    path: str
    handler: Handler
    summary: str
    request: type[msgspec.Struct] | None = None
    file_field: str = ""  # set: the request is a multipart form with this file beside the fields of `request`
    response: type[msgspec.Struct] | None = None
    responses: tuple[type[msgspec.Struct], ...] = ()  # other shapes that the request may ask for
    chunk: type[msgspec.Struct] | None = None  # of the event stream, when the request may ask for one
    media_type: str = "application/json"
    text_types: tuple[str, ...] = ()  # other content types that the request may ask for
    binary_types: tuple[str, ...] = ()  # set: the answer is bytes of one of these types
    errors: tuple[int, ...] = ()
    answers_503: bool = False  # with its own response, not with an error
    open: bool = False  # needs no API key


def document(operations: Iterable[Operation], *, title: str, version: str, secured: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    operations = tuple(operations)
    types: list[type[msgspec.Struct]] = [ErrorEnvelope]
    for operation in operations:
        types += [kind for kind in (operation.request, operation.response, operation.chunk) if kind]
        types += operation.responses
    types = list(dict.fromkeys(types))
    refs, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    ref = dict(zip(types, refs, strict=True))
    for operation in operations:
        if operation.request and operation.file_field:
            form = schemas[ref[operation.request]["$ref"].rsplit("/", 1)[1]]
            form["properties"][operation.file_field] = {"type": "string", "format": "binary"}
            form["required"] = [operation.file_field, *form.get("required", ())]
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(_plain(operation.path), {})[operation.method.lower()] = _operation(operation, ref, secured)
    result: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version, "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if secured:
        result["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return result


def _plain(path: str) -> str:
    return path.replace(":path}", "}")


def _operation(operation: Operation, ref: Mapping[type, Any], secured: bool) -> dict[str, Any]:
    name = operation.path.replace("{model:path}", "one").strip("/").replace("/", "_").replace(".", "_")
    content: dict[str, Any] = {operation.media_type: {"schema": ref[operation.response] if operation.response else {}}}
    if operation.media_type.startswith("text/"):
        content = {operation.media_type: {"schema": {"type": "string"}}}
    if operation.responses:
        shapes = [ref[kind] for kind in (operation.response, *operation.responses) if kind]
        content = {operation.media_type: {"schema": {"anyOf": shapes}}}
    if operation.binary_types:
        content = {kind: {"schema": {"type": "string", "format": "binary"}} for kind in operation.binary_types}
    for kind in operation.text_types:
        content[kind] = {"schema": {"type": "string"}}
    if operation.chunk:
        content["text/event-stream"] = {"schema": {"type": "string"}, "x-event-schema": ref[operation.chunk]}
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    errors = set(operation.errors)
    if operation.request:
        errors |= {400, 408, 413, 415}
    if secured and not operation.open:
        errors.add(401)
    for status in sorted(errors):
        responses[str(status)] = {
            "description": _ERRORS[status],
            "content": {"application/json": {"schema": ref[ErrorEnvelope]}},
        }
    if operation.answers_503:
        responses["503"] = {"description": "Not now; the same body says why.", "content": content}
    result: dict[str, Any] = {
        "operationId": f"{operation.method.lower()}_{name}",
        "summary": operation.summary,
        "responses": responses,
    }
    if "{model:path}" in operation.path:
        result["parameters"] = [
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    if operation.request:
        body = {"application/json": {"schema": ref[operation.request]}}
        if operation.file_field:
            body = {"multipart/form-data": {"schema": ref[operation.request]}}
        result["requestBody"] = {"required": True, "content": body}
    if secured and not operation.open:
        result["security"] = [{"bearer": []}]
    return result
