"""What gateways, browsers and careful clients expect, apart from texts."""

import json
from typing import Any

import httpx
import pytest

from tests.support.event_stream import WITH_IDS, parsed
from tests.support.live_server import serving
from tests.support.toy_api import toy_api
from tests.support.toy_engine import ToyEngine
from tests.unit.serve_app.openai.conftest import LIMITS, MODEL, Api

BODY = {"prompt": "x", "max_tokens": 7, "seed": 1}


def chunks_of(answer: httpx.Response) -> list[Any]:
    """Returns the chunks of a stream, without its end."""
    return [json.loads(event.data) for event in parsed(answer.text) if event.data != "[DONE]"]


def test_the_id_of_a_request_is_that_of_its_header(api: Api) -> None:
    headers = {"X-Request-Id": "gateway-17"}
    answer = api.http.post("/v1/completions", json=BODY, headers=headers)
    assert answer.json()["id"] == "cmpl-gateway-17"
    streamed = api.http.post("/v1/completions", json=BODY | {"stream": True}, headers=headers)
    assert {chunk["id"] for chunk in chunks_of(streamed)} == {"cmpl-gateway-17"}
    assert all("gateway-17" in request.request_id for request in api.engine.requests)


def test_a_resumed_stream_keeps_its_first_id(api: Api) -> None:
    """Ray's proxy gives every request an id of its own."""
    body = BODY | {"stream": True}
    headers = {"X-Request-Id": "first", **WITH_IDS}
    first = api.http.post("/v1/completions", json=body, headers=headers)
    headers = {"X-Request-Id": "second", "Last-Event-ID": parsed(first.text)[1].id}
    resumed = chunks_of(api.http.post("/v1/completions", json=body, headers=headers))
    assert resumed
    assert {chunk["id"] for chunk in resumed} == {"cmpl-first"}


def test_the_body_has_the_last_word_about_the_id(api: Api) -> None:
    answer = api.http.post(
        "/v1/completions", json=BODY | {"request_id": "mine"}, headers={"X-Request-Id": "theirs"}
    )
    assert answer.json()["id"] == "cmpl-mine"


def test_a_request_without_an_id_gets_one(api: Api) -> None:
    first, second = (api.post("/v1/completions", BODY) for _ in range(2))
    assert first.json()["id"] != second.json()["id"]


def test_every_token_says_where_it_came_from(api: Api) -> None:
    """The toy drafts two tokens a round, which are right, and adds one; the last round is short."""
    body = BODY | {"max_tokens": 8, "return_token_origins": True, "return_token_ids": True}
    (choice,) = api.post("/v1/completions", body).json()["choices"]
    assert choice["token_origins"] == [
        *("accepted", "accepted", "bonus"),
        *("accepted", "accepted", "bonus"),
        *("accepted", "recovered"),
    ]
    assert len(choice["token_ids"]) == 8
    assert "".join(choice["token_texts"]) == choice["text"]
    assert (choice["per_step_drafted"], choice["per_step_accepted"]) == ([2, 2, 2], [2, 2, 1])
    streamed = chunks_of(api.post("/v1/completions", body | {"stream": True}))
    chunks = [chunk["choices"][0] for chunk in streamed]
    for field in ("token_origins", "token_texts", "per_step_drafted", "per_step_accepted"):
        assert [entry for chunk in chunks for entry in chunk[field]] == choice[field], field
    off = body | {"speculation": {"mode": "off"}}
    (choice,) = api.post("/v1/completions", off).json()["choices"]
    assert choice["token_origins"] == ["target"] * 8
    assert choice["per_step_drafted"] == []
    (choice,) = api.post("/v1/completions", BODY).json()["choices"]
    assert "token_origins" not in choice


def test_unknown_fields_are_named_in_the_answer(api: Api) -> None:
    body = BODY | {"temprature": 0, "user": "me", "metadata": {"a": "b"}}
    answer = api.post("/v1/completions", body)
    assert answer.status_code == 200
    assert answer.json()["warnings"] == ["the field 'temprature' is not known and was ignored"]
    chunks = chunks_of(api.post("/v1/completions", body | {"stream": True}))
    assert [len(chunk.get("warnings", ())) for chunk in chunks] == [1] + [0] * (len(chunks) - 1)
    assert "warnings" not in api.post("/v1/completions", BODY).json()


def test_a_strict_service_refuses_them(api: Api) -> None:
    LIMITS.strict_fields = True
    try:
        answer = api.post("/v1/completions", BODY | {"temprature": 0})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "temprature"
        assert api.post("/v1/completions", BODY | {"user": "me"}).status_code == 200
    finally:
        LIMITS.strict_fields = False


@pytest.mark.parametrize(
    ("fields", "harmless"),
    [
        ({"prompt_embeds": "AAAA"}, None),
        ({"lora_request": {"name": "x"}}, {}),
        ({"detokenize": False}, True),
        ({"return_tokens_as_token_ids": True}, False),
        ({"spaces_between_special_tokens": False}, True),
        ({"typical_p": 0.5}, 1.0),
        ({"mirostat": 2}, 0),
    ],
)
def test_what_would_change_the_answer_is_refused(
    fields: dict[str, Any], harmless: object, api: Api
) -> None:
    ((name, _),) = fields.items()
    answer = api.post("/v1/completions", BODY | fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name
    answer = api.post("/v1/completions", BODY | {name: harmless})
    assert answer.status_code == 200
    assert "warnings" not in answer.json()


def test_a_chat_is_not_echoed(api: Api) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    assert api.post("/v1/chat/completions", body | {"echo": True}).status_code == 400
    assert api.post("/v1/chat/completions", body | {"echo": False}).status_code == 200


def test_a_bad_word_that_is_no_text_is_refused_by_name(api: Api) -> None:
    raw = b'{"prompt": "x", "bad_words": ["\\ud800"]}'
    headers = {"Content-Type": "application/json"}
    answer = api.http.post("/v1/completions", content=raw, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "bad_words"


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/v1/models", "/version"])
def test_head_answers_as_get_without_a_body(path: str, api: Api) -> None:
    whole, head = api.get(path), api.http.head(path)
    assert head.status_code == whole.status_code == 200
    assert head.content == b""
    assert head.headers.get("content-length") == whole.headers.get("content-length")
    assert head.headers.get("content-type") == whole.headers.get("content-type")


def test_ready_is_about_texts_and_ping_about_the_process(api: Api) -> None:
    api.illness = "no pipeline"
    assert api.get("/ready").status_code == 503
    assert api.http.head("/ready").status_code == 503
    assert api.get("/ping").status_code == 200


def test_pages_of_the_named_origins_may_call() -> None:
    app = toy_api(
        ToyEngine(), max_model_len=100, api_key="secret", cors_origins=["https://app.example"]
    )
    question = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    with serving(app) as url, httpx.Client(base_url=url) as http:
        allowed = http.options(
            "/v1/completions", headers={"Origin": "https://app.example", **question}
        )
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        other = http.options(
            "/v1/completions", headers={"Origin": "https://evil.example"} | question
        )
        assert "access-control-allow-origin" not in other.headers
        answer = http.post(
            "/v1/completions",
            json=BODY,
            headers={"Origin": "https://app.example", "Authorization": "Bearer secret"},
        )
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
        response = http.post(
            "/v1/completions", json=BODY, headers={"Origin": "https://app.example"}
        )
        assert response.status_code == 401
        assert json.loads(response.text)["error"]["code"] == "invalid_api_key"


def test_a_page_of_a_named_origin_can_read_an_unexpected_error() -> None:
    engine = ToyEngine()
    engine.refusal = RuntimeError("a bug")
    origin = "https://app.example"
    app = toy_api(engine, max_model_len=100, cors_origins=[origin])
    limits = httpx.Limits(max_keepalive_connections=0)  # a bug ends its connection
    with serving(app) as url, httpx.Client(base_url=url, limits=limits) as http:
        for path, body in (("/v1/completions", BODY), ("/v1/completions", BODY | {"stream": True})):
            answer = http.post(path, json=body, headers={"Origin": origin, "X-Request-Id": "mine"})
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "internal_error"
            assert answer.headers.get_list("access-control-allow-origin") == [origin]
            assert answer.headers.get_list("x-request-id") == ["mine"]


def test_without_named_origins_no_page_may_call(api: Api) -> None:
    answer = api.http.post(
        "/v1/completions", json=BODY | {"model": MODEL}, headers={"Origin": "https://app.example"}
    )
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_allowed_tokens_and_bad_words_reach_the_engine(path: str, api: Api) -> None:
    prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user"}]}
    body = prompt | {"max_tokens": 3, "allowed_token_ids": [9, 5, 9], "bad_words": ["no", "not so"]}
    assert api.post(path, body).status_code == 200
    sampling = api.engine.requests[0].sampling
    assert sampling.allowed_token_ids == (5, 9)
    encode = api.tokenizer.encode
    assert set(sampling.bad_words) == {
        encode(word, add_special_tokens=False) for word in ("no", " no", "not so", " not so")
    }
    response = api.post(path, prompt | {"allowed_token_ids": [999_999]})
    assert response.json()["error"]["param"] == "allowed_token_ids"
    assert api.post(path, prompt | {"allowed_token_ids": []}).status_code == 400
    assert api.post(path, prompt | {"bad_words": [""]}).status_code == 400
    assert api.post(path, prompt | {"bad_words": ["a"] * 1025}).status_code == 400
    assert api.post(path, prompt | {"bad_words": ["a" * 257]}).status_code == 400
