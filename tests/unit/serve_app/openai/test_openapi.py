"""The OpenAPI document says what the API does."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from serve_app.ingress.operator_api import operator_router
from serve_app.openai.errors import TABLE
from tests.support.live_server import serving
from tests.support.toy_api import toy_api
from tests.support.toy_engine import ToyEngine
from tests.support.toy_operated import ToyOperated

OPEN = {"/health", "/ready", "/ping", "/metrics", "/version"}
REQUESTS: list[tuple[str, str, dict[str, Any]]] = [
    ("post", "/v1/completions", {"json": {"prompt": "x", "max_tokens": 4}}),
    ("post", "/v1/completions", {"json": {"prompt": "x", "max_tokens": 4, "stream": True}}),
    ("post", "/v1/completions", {"json": {"prompt": "x" * 200}}),
    ("post", "/v1/completions", {"json": {"prompt": "x", "model": "other"}}),
    ("post", "/v1/completions", {"json": [3]}),
    ("post", "/v1/completions", {"content": b"x" * 3_000_000}),
    ("post", "/v1/completions", {"json": {}, "headers": {"Authorization": "Bearer l"}}),
    ("post", "/v1/chat/completions", {"json": {"messages": [{"role": "user", "content": "x"}]}}),
    ("post", "/v1/responses", {"json": {"input": "x"}}),
    ("post", "/v1/responses", {"json": {"input": "x", "stream": True}}),
    ("post", "/v1/responses", {"json": {"input": "x", "tools": [{}]}}),
    ("get", "/v1/models", {}),
    ("get", "/v1/models/toy", {}),
    ("get", "/v1/models/other", {}),
    ("post", "/tokenize", {"json": {"prompt": "hello"}}),
    ("post", "/detokenize", {"json": {"tokens": [104, 105]}}),
    ("get", "/health", {}),
    ("get", "/ready", {}),
    ("get", "/ping", {}),
    ("get", "/metrics", {}),
    ("get", "/metrics", {"headers": {"X-Request-Id": "a b"}}),
    ("get", "/version", {}),
    ("get", "/version", {"headers": {"X-Long": "x" * 70_000}}),
    ("get", "/debug/state", {}),
    ("get", "/debug/state", {"headers": {"Authorization": "Bearer l"}}),
    ("get", "/debug/pipelines", {}),
    ("get", "/debug/controllers", {}),
    ("get", "/debug/rounds", {}),
    ("post", "/debug/pipelines/other/drain", {}),
    ("post", "/debug/pipelines/one/drain", {"headers": {"Authorization": "Bearer l"}}),
    ("post", "/debug/pipelines/one/drain", {}),
    ("post", "/debug/pipelines/two/drain", {}),
    ("post", "/debug/pipelines/one/undrain", {}),
]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    app = toy_api(ToyEngine(), max_model_len=100, api_key="k")
    app.include_router(operator_router(ToyOperated(), has_key=True))
    headers = {"Authorization": "Bearer k"}
    with serving(app) as url, httpx.Client(base_url=url, headers=headers, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def document(http: httpx.Client) -> dict[str, Any]:
    document: dict[str, Any] = http.get("/openapi.json").json()
    return document


@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_an_answer_is_one_that_the_document_has(
    number: int, http: httpx.Client, document: dict[str, Any]
) -> None:
    method, path, options = REQUESTS[number]
    answer = http.request(method, path, **options)
    route = re.sub("(/v1/models|/pipelines)/[a-z]+", r"\1/{name}", path)
    response = document["paths"][route][method]["responses"][str(answer.status_code)]
    kind = answer.headers["content-type"].partition(";")[0]
    content = response["content"][kind]
    if kind == "application/json":
        whole = {**content["schema"], "components": document["components"]}
        jsonschema.validate(answer.json(), whole)
    if kind == "text/event-stream":
        for event in answer.text.strip().split("\n\n"):
            fields = dict(line.split(": ", 1) for line in event.splitlines())
            jsonschema.validate(fields, content["itemSchema"])


def test_every_path_says_which_key_it_needs_and_every_error_is_somewhere(
    document: dict[str, Any],
) -> None:
    statuses = set[int]()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            statuses |= set(map(int, operation["responses"]))
            assert ("security" in operation) == (path not in OPEN), path
            assert ("401" in operation["responses"]) == (path not in OPEN)
    assert {row.status for row in TABLE} | {200, 500} == statuses
    assert "HTTPValidationError" not in document["components"]["schemas"]
    names = {p["name"] for p in document["paths"]["/v1/completions"]["post"]["parameters"]}
    assert names == {
        "X-Request-Id",
        "traceparent",
        "Last-Event-ID",
        "X-Eesd-Event-Ids",
        "X-Eesd-Workload",
    }


def test_without_a_key_the_document_asks_for_none() -> None:
    document = toy_api(ToyEngine(), max_model_len=100).openapi()
    assert "securitySchemes" not in document["components"]
    assert all(
        "401" not in op["responses"] for ops in document["paths"].values() for op in ops.values()
    )


@pytest.mark.parametrize(
    ("path", "name", "body"),
    [
        ("/v1/completions", "CompletionFields", {"prompt": "x", "max_tokens": 2}),
        (
            "/v1/chat/completions",
            "ChatFields",
            {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
        ),
        ("/v1/responses", "ResponsesFields", {"input": "x", "max_output_tokens": 2}),
        ("/tokenize", "TokenizeFields", {"prompt": "x"}),
        ("/detokenize", "DetokenizeFields", {"tokens": [104]}),
    ],
)
def test_a_field_may_be_null_where_the_document_says_so(
    path: str, name: str, body: dict[str, Any], http: httpx.Client, document: dict[str, Any]
) -> None:
    schema = document["components"]["schemas"][name]
    for field, described in schema["properties"].items():
        may_be_null = {"type": "null"} in described.get("anyOf", ())
        assert may_be_null == (field not in schema.get("required", ()))
        if field not in body:
            assert http.post(path, json=body | {field: None}).status_code == 200, field


def test_a_wrong_method_is_told_the_right_ones(http: httpx.Client) -> None:
    for method, path, allowed in (
        ("TRACE", "/v1/completions", {"POST"}),
        ("DELETE", "/v1/models", {"GET", "HEAD"}),
    ):
        answer = http.request(method, path)
        assert answer.status_code == 405
        assert set(answer.headers["allow"].split(", ")) == allowed
