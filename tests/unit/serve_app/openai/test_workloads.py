"""Which class a request is put into, by its own word or by what it is."""

import httpx
import pytest

from tests.unit.serve_app.openai.conftest import MODEL, Api


def _classes(api: Api, body: dict[str, object], headers: dict[str, str] | None = None) -> set[str]:
    answer = httpx.post(
        f"{api.url}/v1/completions",
        json={"model": MODEL, "prompt": "x", "max_tokens": 2, **body},
        headers=headers,
        timeout=30,
    )
    assert answer.status_code == 200, answer.text
    return {request.workload for request in api.engine.requests}


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        (0.0, "completion/t0"),
        (0.5, "completion/t0.5"),
        (0.8, "completion/t1"),
        (1.2, "completion/hot"),
    ],
)
def test_an_unnamed_class_is_the_kind_of_request_and_its_temperature(
    api: Api, temperature: float, expected: str
) -> None:
    assert _classes(api, {"temperature": temperature}) == {expected}


def test_the_header_names_the_class_and_the_body_has_the_last_word(api: Api) -> None:
    header = {"x-eesd-workload": "team/code"}
    assert _classes(api, {"n": 2}, header) == {"team/code"}
    assert len(api.engine.requests) == 2
    api.engine.requests.clear()
    assert _classes(api, {"speculation": {"workload": "poetry"}}, header) == {"poetry"}


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "naïve"])
def test_a_name_that_is_no_label_is_refused(api: Api, name: str) -> None:
    body = {"model": MODEL, "prompt": "x", "speculation": {"workload": name}}
    answer = httpx.post(f"{api.url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 400
    assert "workload" in answer.text


def test_a_header_that_is_no_label_is_refused_by_name(api: Api) -> None:
    body = {"model": MODEL, "prompt": "x"}
    headers = {"x-eesd-workload": "two words"}
    answer = httpx.post(f"{api.url}/v1/completions", json=body, headers=headers, timeout=30)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-eesd-workload"
