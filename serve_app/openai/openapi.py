"""The OpenAPI document: what FastAPI reads from the routes, and the answers that it cannot know.

FastAPI assumes that a wrong body is answered with 422, and knows neither headers, nor the key, nor
streams. Every status that a path may answer is listed, by the table of errors.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI

from serve_app.openai.context import HEADERS, LAST_EVENT_ID_HEADER
from serve_app.openai.errors import TABLE
from serve_app.openai.middleware.gate import OPEN_PATHS, OPERATORS

Json = dict[str, Any]

_RESPONSES = "/v1/responses"
_GENERATION = frozenset({"/v1/completions", "/v1/chat/completions", _RESPONSES})
_CHANGES = frozenset(f"{OPERATORS}pipelines/{{name}}/{change}" for change in ("drain", "undrain"))
_OF_CHANGES = frozenset({403, 404, 409})
_ALWAYS = frozenset({400, 431, 500})
"""Headers that are no text or too long, and bugs."""
_OF_BODIES = frozenset({404, 408, 413, 415, 429})
_OF_GENERATION = frozenset({409, 422, 503})
_KEY = "api_key"
_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string", "enum": sorted({row.type for row in TABLE})},
                "param": {"type": ["string", "null"], "description": "the field it is about"},
                "code": {
                    "type": ["string", "null"],
                    "enum": [*sorted({r.code for r in TABLE if r.code}), "internal_error", None],
                },
            },
        }
    },
}


def _object(**properties: object) -> Json:
    return {"type": "object", "required": list(properties), "properties": properties}


_TEXT, _COUNT, _LIST = {"type": "string"}, {"type": "integer"}, {"type": "array"}
_USAGE = _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)
_CARD = _object(id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT)
_ANSWERS: Mapping[str, Json] = {
    "/v1/completions": _object(
        id=_TEXT,
        object={"const": "text_completion"},
        created=_COUNT,
        model=_TEXT,
        choices={
            "type": "array",
            "items": _object(index=_COUNT, text=_TEXT, finish_reason=_TEXT, logprobs={}),
        },
        usage=_USAGE,
        metrics={"type": "object"},
    ),
    "/v1/chat/completions": _object(
        id=_TEXT,
        object={"const": "chat.completion"},
        created=_COUNT,
        model=_TEXT,
        choices={
            "type": "array",
            "items": _object(
                index=_COUNT,
                message=_object(role=_TEXT, content={"type": ["string", "null"]}),
                finish_reason=_TEXT,
                logprobs={},
            ),
        },
        usage=_USAGE,
        metrics={"type": "object"},
    ),
    _RESPONSES: _object(
        id=_TEXT,
        object={"const": "response"},
        created_at=_COUNT,
        model=_TEXT,
        status=_TEXT,
        output={"type": "array", "items": _object(type=_TEXT, role=_TEXT, content=_LIST)},
        usage=_object(input_tokens=_COUNT, output_tokens=_COUNT, total_tokens=_COUNT),
    ),
    "/v1/models": _object(object={"const": "list"}, data={"type": "array", "items": _CARD}),
    "/v1/models/{name}": _CARD,
    "/tokenize": _object(tokens=_LIST, count=_COUNT, max_model_len=_COUNT),
    "/detokenize": _object(prompt=_TEXT),
    "/version": _object(version=_TEXT),
}
"""JSON of the answers with status 200; other paths answer with text, or nothing."""
_EVENTS: Json = {
    "itemSchema": {
        "type": "object",
        "required": ["data"],
        "properties": {"data": _TEXT, "event": _TEXT, "id": _TEXT},
        "description": "with `stream`: server-sent events, each a chunk or a named event",
    }
}
"""`itemSchema` describes one event, as FastAPI's own documents do."""


def describe_truly(app: FastAPI, *, has_key: bool) -> None:
    """Makes the application's OpenAPI document complete; call when all its routes are there."""
    from_routes = app.openapi

    def whole() -> Json:
        document = from_routes()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        if "Error" in schemas:  # made before
            return document
        for schema_name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(schema_name, None)
        schemas["Error"] = _ERROR
        if has_key:
            scheme = {"type": "http", "scheme": "bearer"}
            document["components"]["securitySchemes"] = {_KEY: scheme}
        for path, operations in document["paths"].items():
            for operation in operations.values():
                _complete(operation, path=path, needs_key=has_key and path not in OPEN_PATHS)
        return document

    app.openapi = whole  # type: ignore[method-assign]


def _complete(operation: Json, *, path: str, needs_key: bool) -> None:
    operation["responses"] = {"200": _success(path)} | {
        str(status): _failure(status) for status in _failures(operation, path, needs_key=needs_key)
    }
    if needs_key:
        operation["security"] = [{_KEY: []}]
    if path in _GENERATION:
        operation["parameters"] = [
            {"name": name, "in": "header", "description": text, "schema": schema}
            for name, (text, schema) in HEADERS.items()
            if path != _RESPONSES or name != LAST_EVENT_ID_HEADER
        ]


def _success(path: str) -> Json:
    description = "a chunked stream, or the whole answer" if path in _GENERATION else "success"
    answer = _ANSWERS.get(path, {"type": "object"} if path.startswith(OPERATORS) else None)
    if answer is None:
        return {"description": description, "content": {"text/plain": {"schema": _TEXT}}}
    content: Json = {"application/json": {"schema": answer}}
    if path in _GENERATION:
        content["text/event-stream"] = _EVENTS
    return {"description": description, "content": content}


def _failures(operation: Json, path: str, *, needs_key: bool) -> list[int]:
    statuses = set(_ALWAYS)
    if needs_key:  # 503: the file of keys was wrong when this ingress started
        statuses |= {int(HTTPStatus.UNAUTHORIZED), int(HTTPStatus.SERVICE_UNAVAILABLE)}
    if "requestBody" in operation:
        statuses |= _OF_BODIES
    if path in _GENERATION:
        statuses |= _OF_GENERATION
    if needs_key and path.startswith(OPERATORS):
        statuses.add(int(HTTPStatus.FORBIDDEN))
    if path in ("/v1/models/{name}", f"{OPERATORS}traces/{{request_id}}"):
        statuses.add(int(HTTPStatus.NOT_FOUND))
    if path in _CHANGES:
        statuses |= _OF_CHANGES
    if path in ("/health", "/ready", "/metrics") or path.startswith(OPERATORS):
        statuses.add(int(HTTPStatus.SERVICE_UNAVAILABLE))
    return sorted(statuses)


def _failure(status: int) -> Json:
    codes = sorted({row.code for row in TABLE if row.status == status and row.code})
    schema = {"$ref": "#/components/schemas/Error"}
    failure: Json = {
        "description": ", ".join(codes) or HTTPStatus(status).phrase,
        "content": {"application/json": {"schema": schema}},
    }
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        failure["headers"] = {"Retry-After": {"description": "seconds", "schema": _COUNT}}
    return failure
