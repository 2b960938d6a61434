"""A server's answers as errors: of the row, or of the service. The server is a toy."""

import asyncio
import json
from contextlib import aclosing

import pytest
from starlette.responses import Response
from starlette.types import ASGIApp

from eesd_dist.errors import CapacityError, ConfigError, EesdError, EngineError, RequestError
from serve_app.batch.http_client import HttpClient
from tests.support.live_server import serving
from tests.support.toy_api import toy_api
from tests.support.toy_engine import ToyEngine

ERROR = '{"error": {"message": "its own words", "code": "poison_request"}}'


def _saying(content: str, status: int = 200) -> ASGIApp:
    return Response(content, status_code=status)


async def _model_name(url: str) -> str:
    async with aclosing(HttpClient(url, api_key=None)) as client:
        return await client.model_name()


async def _answer(url: str, **fields: object) -> None:
    async with aclosing(HttpClient(url, api_key=None)) as client:
        await client.answer("completion", {"prompt": "x", "max_tokens": 4, **fields})


def _refused(app: ASGIApp) -> EesdError:
    with serving(app) as url, pytest.raises(EesdError) as raised:
        asyncio.run(_answer(url))
    return raised.value


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, None), (413, None), (422, "poison_request"), (404, "model_not_found")],
)
def test_what_is_wrong_with_the_request_is_the_requests_fault(
    status: int, code: str | None
) -> None:
    content = json.dumps({"error": {"message": "its own words", "code": code}})
    error = _refused(_saying(content, status))
    assert isinstance(error, RequestError)
    assert str(error) == "its own words"


@pytest.mark.parametrize(
    ("headers", "pause_s"),
    [
        ({}, 1.0),
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": "99999999999"}, 120.0),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, 1.0),
    ],
)
def test_a_full_service_is_no_fault_of_the_request_and_says_when_to_come_back(
    headers: dict[str, str], pause_s: float
) -> None:
    error = _refused(Response(ERROR, status_code=429, headers=headers))
    assert isinstance(error, CapacityError)
    assert error.retry_after_s == pause_s


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (401, "check the API key"),
        (403, "check the API key"),
        (404, "check --url, and that the model is still served there"),
        (405, "check --url"),
        (408, "check what stands between"),
        (307, "log"),
        (418, "log"),
        (502, "log"),
    ],
)
def test_a_service_that_is_away_is_no_fault_of_the_request(status: int, advice: str) -> None:
    error = _refused(_saying("Path '/v1/completions' not found.", status))
    assert isinstance(error, EngineError)
    assert f"HTTP {status} (" in str(error)
    assert advice in str(error)


@pytest.mark.parametrize(
    "content",
    ["<html>hello</html>", "[]", "7", '{"data": []}', '{"data": [{"name": "gpt"}]}'],
)
def test_another_server_is_named_and_called_no_service_of_ours(content: str) -> None:
    with (
        serving(_saying(content)) as url,
        pytest.raises(ConfigError, match=rf"^{url} is no eesd service: /v1/models was answered"),
    ):
        asyncio.run(_model_name(url.replace("//", "//me:secret@")))


@pytest.mark.parametrize("status", [401, 404])
def test_a_refused_model_card_is_one_line_with_what_to_check(status: int) -> None:
    with serving(_saying("no", status)) as url, pytest.raises(EngineError) as raised:
        asyncio.run(_model_name(url))
    assert f"{url}: HTTP {status} (" in str(raised.value)
    assert "check" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "content",
    [
        "<html>hello</html>",
        "[]",
        '{"choices": []}',
        '{"choices": [], "usage": null}',
        '{"choices": [], "usage": {"completion_tokens": null}}',
    ],
)
def test_an_answer_of_another_form_is_no_service_of_ours_either(content: str) -> None:
    error = _refused(_saying(content))
    assert isinstance(error, EngineError)
    assert "is no eesd service: /v1/completions was answered" in str(error)


def test_the_body_reaches_the_service_as_it_is() -> None:
    engine = ToyEngine()
    with serving(toy_api(engine, max_model_len=100)) as url:
        asyncio.run(_answer(url, cache_salt="s", logprobs=2, bad_words=["y"]))
    (request,) = engine.requests
    assert (request.cache_salt, request.sampling.top_logprobs) == ("s", 2)
    assert (ord("y"),) in request.sampling.bad_words
