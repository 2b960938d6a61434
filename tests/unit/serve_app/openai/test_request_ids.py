"""The id of a request in its answer and in the log."""

import logging

import httpx
import pytest

from eesd_dist.telemetry.logs import current_request
from tests.support.running import until
from tests.unit.serve_app.openai.conftest import Api

BODY = {"prompt": "abc", "max_tokens": 3}
PATH = "/v1/completions"


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("answered: ")]


def test_an_answer_repeats_the_id_that_was_sent_or_drawn(api: Api) -> None:
    answer = api.http.post(PATH, json=BODY, headers={"X-Request-Id": "mine"})
    assert (answer.headers["x-request-id"], answer.json()["id"]) == ("mine", "cmpl-mine")
    drawn = api.http.post(PATH, json=BODY)
    assert drawn.json()["id"] == f"cmpl-{drawn.headers['x-request-id']}"
    other = api.http.post(PATH, json=BODY)
    assert other.headers["x-request-id"] != drawn.headers["x-request-id"]
    body = api.http.post(
        PATH, json={**BODY, "request_id": "of-body"}, headers={"X-Request-Id": "x"}
    )
    assert (body.headers["x-request-id"], body.json()["id"]) == ("x", "cmpl-of-body")


def test_a_refusal_has_an_id_too(api: Api) -> None:
    response = api.http.post(PATH, json={"prompt": 3.5}, headers={"X-Request-Id": "mine"})
    assert (response.status_code, response.headers["x-request-id"]) == (400, "mine")
    forged = api.http.post(PATH, json=BODY, headers={"X-Request-Id": "a b"})
    assert forged.status_code == 400
    assert len(forged.headers["x-request-id"]) == 32


def test_an_unexpected_error_has_its_id_and_status(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    api.engine.refusal = RuntimeError("toy broke")
    answer = api.http.post(PATH, json=BODY, headers={"X-Request-Id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")
    until(lambda: len(_lines(caplog)) == 1)
    [line] = _lines(caplog)
    assert "request=mine key=anyone method=POST path=/v1/completions status=500" in line


def test_each_request_is_one_line_with_its_tokens(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    api.http.post(PATH, json=BODY, headers={"X-Request-Id": "mine"})
    api.http.get("/health")
    api.http.get("/nothing")
    with api.http.stream(
        "POST", PATH, json={**BODY, "stream": True}, headers={"X-Request-Id": "streamed"}
    ) as answer:
        list(answer.iter_lines())
    until(lambda: len(_lines(caplog)) == 3)  # the last one ends after its answer
    first, missing, streamed = _lines(caplog)
    assert "request=mine key=anyone method=POST path=/v1/completions status=200" in first
    assert first.endswith("prompt_tokens=3 tokens=3")
    assert "method=GET path=other status=404" in missing
    assert "request=streamed" in streamed
    assert streamed.endswith("tokens=3")


def test_lines_about_a_request_are_written_where_it_is_known(api: Api) -> None:
    request_ids: list[str] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "ignored" in record.getMessage():
                request_ids.append(current_request.get())

    handler = Noting()
    logger = logging.getLogger("serve_app.openai.preparation")
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        answer: httpx.Response = api.http.post(
            PATH, json={**BODY, "no_such_field": 1}, headers={"X-Request-Id": "mine"}
        )
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    assert answer.status_code == 200
    assert request_ids == ["mine"]
