"""A stream that is cut anywhere and resumed is the stream that was not cut, field by field."""

import hmac
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from eesd_dist.errors import ResumedElsewhere
from serve_app.openai.event_ids import EventIds, Origin, Shown, WrongEventId, digest_of, opened
from serve_app.openai.schema import CompletionFields
from tests.support.event_stream import WITH_IDS, SentEvent, folded, parsed
from tests.support.live_server import serving
from tests.support.toy_api import toy_api
from tests.support.toy_engine import ToyEngine
from tests.unit.serve_app.openai.conftest import LIMITS, MODEL, Api

Body = dict[str, Any]
COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
USAGE = {"stream_options": {"include_usage": True}}
WORDS = "the quick — brown 🦊 jumps über the lazy dog"

CASES: list[tuple[str, str, str | None, Body]] = [
    ("a drawn seed", COMPLETION, None, {"prompt": "once", "max_tokens": 20}),
    ("usage and ids", COMPLETION, None, {"prompt": "x", "return_token_ids": True, **USAGE}),
    ("logprobs", COMPLETION, WORDS, {"prompt": "x", "logprobs": 2, "return_token_ids": True}),
    ("echo", COMPLETION, WORDS, {"prompt": ["once", "upon"], "echo": True, "max_tokens": 12}),
    (
        "two prompts, three choices",
        COMPLETION,
        None,
        {"prompt": ["a", "b"], "n": 3, "max_tokens": 7, "return_token_ids": True, **USAGE},
    ),
    ("a stop string", COMPLETION, WORDS, {"prompt": "x", "stop": "lazy d", "max_tokens": 60}),
    (
        "text held back to the end",
        COMPLETION,
        WORDS,
        {
            "prompt": "x",
            "stop": ["lazy dogs", "brown 🦊 jumps ü-"],
            "max_tokens": 60,
            "logprobs": 0,
        },
    ),
    (
        "a stop string in the output",
        CHAT,
        WORDS,
        {"messages": USER, "stop": "über", "include_stop_str_in_output": True, **USAGE},
    ),
    (
        "a chat with logprobs",
        CHAT,
        WORDS,
        {"messages": USER, "logprobs": True, "top_logprobs": 2, "return_token_ids": True, **USAGE},
    ),
    (
        "three choices of a chat",
        CHAT,
        None,
        {"messages": USER, "n": 3, "max_tokens": 9, "request_id": "mine", **USAGE},
    ),
]


def _events(
    api: Api, path: str, body: Body, *, after: str | None = None, status: int = 200
) -> list[SentEvent]:
    headers = WITH_IDS if after is None else {"Last-Event-ID": after}
    answer = api.http.post(path, json={**body, "stream": True}, headers=headers)
    assert answer.status_code == status, answer.text
    return parsed(answer.text) if status == 200 else []


@pytest.mark.parametrize(
    ("path", "says", "body"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
@pytest.mark.parametrize(("group", "second_group"), [(1, 4), (3, 2), (7, 1)])
def test_parts_of_a_stream_cut_at_any_event_are_the_whole(
    api: Api, path: str, says: str | None, body: Body, group: int, second_group: int
) -> None:
    if says is not None:
        api.says(says)
    api.engine.group = group
    whole = _events(api, path, body)
    api.engine.group, api.engine.rounds_per_batch = second_group, group
    cuts = [i for i, event in enumerate(whole) if event.id]
    assert cuts
    for cut in cuts:
        suffix = _events(api, path, body, after=whole[cut].id)
        assert folded(whole[: cut + 1] + suffix) == folded(whole), cut


@pytest.mark.parametrize("rounds_per_batch", [1, 3, 50])
def test_a_resumed_stream_repeats_no_draft(api: Api, rounds_per_batch: int) -> None:
    body = {"prompt": "x", "max_tokens": 20, "return_token_origins": True, "seed": 1}

    def drafts(events: list[SentEvent]) -> list[tuple[int, int]]:
        choices = [choice for event in events[:-1] for choice in event.chunk["choices"]]
        return [
            draft
            for choice in choices
            for draft in zip(choice["per_step_drafted"], choice["per_step_accepted"], strict=True)
        ]

    whole = _events(api, COMPLETION, body)
    assert len(drafts(whole)) == 7
    api.engine.rounds_per_batch = rounds_per_batch
    for cut, event in enumerate(whole[:-1]):
        suffix = _events(api, COMPLETION, body, after=event.id)
        assert drafts(whole[: cut + 1] + suffix) == drafts(whole), cut


def test_another_flush_interval_resumes_the_stream(api: Api) -> None:
    body = {"prompt": "x", "max_tokens": 20, "seed": 1}
    whole = _events(api, COMPLETION, body)
    other = {**body, "stream_options": {"flush_interval_s": 0.5}}
    suffix = _events(api, COMPLETION, other, after=whole[0].id)
    assert folded(whole[:1] + suffix) == folded(whole)
    assert api.engine.requests[-1].flush_interval_s == 0.5


def test_a_resumed_stream_can_be_resumed_at_each_of_its_events(api: Api) -> None:
    body = {"prompt": "x", "n": 2, "max_tokens": 12, "return_token_ids": True, **USAGE}
    whole = _events(api, COMPLETION, body)
    read, last = list(whole[:2]), whole[1].id
    for group in (5, 2, 4, 1, 3) * 5:
        api.engine.group = group
        suffix = _events(api, COMPLETION, body, after=last)
        if not suffix[0].id:
            assert folded(read + suffix) == folded(whole)
            return
        read.append(suffix[0])
        last = suffix[0].id
    pytest.fail("it never ended")


def test_a_stream_that_was_shown_to_its_end_sends_its_usage_and_no_more(api: Api) -> None:
    body: Body = {"prompt": "x", "max_tokens": 5}
    last = [event.id for event in _events(api, COMPLETION, body) if event.id][-1]
    num_requests = len(api.engine.requests)
    assert [e.data for e in _events(api, COMPLETION, body, after=last)] == ["[DONE]"]
    assert len(api.engine.requests) == num_requests, "there is nothing to compute"

    with_usage = {**body, **USAGE}
    last = [event.id for event in _events(api, COMPLETION, with_usage) if event.id][-1]
    usage, done = _events(api, COMPLETION, with_usage, after=last)
    assert usage.chunk["usage"]["completion_tokens"] == 5
    assert (usage.chunk["choices"], done.data) == ([], "[DONE]")


def test_the_engine_gets_the_same_request_wherever_a_stream_is_resumed(api: Api) -> None:
    body = {"prompt": "x", "n": 2, "request_id": "mine", "max_tokens": 9}
    whole = _events(api, COMPLETION, body)
    _events(api, COMPLETION, body, after=whole[0].id)
    first, second = api.engine.requests[:2], api.engine.requests[2:]
    assert {r.request_id for r in first} == {r.request_id for r in second}
    assert {r.sampling.seed for r in first} == {r.sampling.seed for r in second}
    assert {r.resumption for r in first} == {0}
    assert all(time.time_ns() - r.resumption < 60e9 for r in second)


def test_two_streams_of_one_request_id_are_two_streams(api: Api) -> None:
    body = {"prompt": "x", "request_id": "mine"}
    first_stream, second_stream = _events(api, COMPLETION, body), _events(api, COMPLETION, body)
    assert first_stream[0].chunk["id"] == second_stream[0].chunk["id"] == "cmpl-mine"
    first, second = api.engine.requests
    assert first.request_id != second.request_id


def test_events_without_text_have_no_id(api: Api) -> None:
    api.says("hello")
    events = _events(api, CHAT, {"messages": USER, **USAGE})
    assert [bool(event.id) for event in events[:1] + events[-2:]] == [False, False, False]
    assert all(event.id for event in events[1:-2])
    assert len({event.id for event in events[1:-2]}) == len(events) - 3


def test_spaces_order_and_spelt_out_defaults_make_no_other_body(api: Api) -> None:
    whole = _events(api, COMPLETION, {"prompt": "x", "max_tokens": 20, "user": "u"})
    same = '{ "user": "u",  "temperature": 1, "stream": true, "max_tokens": 20, "prompt": "x"}'
    headers = {"Last-Event-ID": whole[2].id, "Content-Type": "application/json"}
    suffix = parsed(api.http.post(COMPLETION, content=same, headers=headers).text)
    assert folded(whole[:3] + suffix) == folded(whole)


WRONG: dict[str, Callable[[str], str]] = {
    "empty": lambda _: "",
    "no base64": lambda good: "*" * len(good),
    "not ASCII": lambda good: "é" * len(good),
    "short": lambda good: good[:-4],
    "long": lambda good: good + "AAAA",
    "without an origin": lambda good: good[:8],
    "of another version": lambda good: "g" + good[1:],
    "as long as a header may be": lambda good: "A" * 60_000,
    "of more choices": lambda _: _forged(num_choices=2),
    "forged": lambda _: _forged(num_choices=1),
}


def _forged(*, num_choices: int) -> str:
    origin = Origin(seed=1, nonce=bytes(16), created_unix_s=1, request_id="")
    ids = EventIds(origin, [Shown()] * num_choices, key=b"another", digest=bytes(32))
    return ids.after(0, Shown(3, 3)).decode()


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_id_is_refused_before_any_work(api: Api, wrong: str) -> None:
    body = {"prompt": "x"}
    good = _events(api, COMPLETION, body)[0].id
    num_requests = len(api.engine.requests)
    headers = {"Last-Event-ID": WRONG[wrong](good).encode()}
    answer = api.http.post(COMPLETION, json={**body, "stream": True}, headers=headers)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == "Last-Event-ID"
    assert error["message"] == str(WrongEventId())
    assert len(api.engine.requests) == num_requests


@pytest.mark.parametrize(
    ("path", "other"),
    [
        (COMPLETION, {"prompt": "y"}),
        (COMPLETION, {"prompt": "x", "seed": 1}),
        (COMPLETION, {"prompt": "x", "request_id": "mine"}),
        (COMPLETION, {"prompt": "x", "max_tokens": 17}),
        (COMPLETION, {"prompt": "x", "user": "someone"}),
        (CHAT, {"messages": USER}),
    ],
)
def test_an_id_of_another_body_is_refused(api: Api, path: str, other: Body) -> None:
    good = _events(api, COMPLETION, {"prompt": "x"})[0].id
    _events(api, COMPLETION, {"prompt": "x"}, after=good)
    _events(api, path, other, after=good, status=400)


def test_an_id_without_a_stream_is_refused(api: Api) -> None:
    good = _events(api, COMPLETION, {"prompt": "x"})[0].id
    headers = {"Last-Event-ID": good}
    answer = api.http.post(COMPLETION, json={"prompt": "x"}, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "Last-Event-ID"
    assert "stream: true" in answer.json()["error"]["message"]


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("name", ["", "gateway-17"])
def test_an_id_with_one_other_character_is_refused(num_choices: int, name: str) -> None:
    origin = Origin(seed=2**64 - 1, nonce=b"n" * 16, created_unix_s=1_900_000_000, request_id=name)
    ids = EventIds(origin, [Shown()] * num_choices, key=b"k", digest=b"d" * 32)
    shown = Shown(2**31 - 1, 2**32 - 1, True)
    good = ids.after(num_choices - 1, shown).decode()
    read = opened(good, key=b"k", digest=b"d" * 32, num_choices=num_choices)
    assert read == (origin, (*[Shown()] * (num_choices - 1), shown))
    for i, character in enumerate(good):
        for other in {"A", "B", "z", "-", "_"} - {character}:
            changed = good[:i] + other + good[i + 1 :]
            with pytest.raises(WrongEventId):
                opened(changed, key=b"k", digest=b"d" * 32, num_choices=num_choices)


@pytest.mark.parametrize("name", [b"\xff\xfe", b"a\nERROR forged", b"a b", b"\x7f"])
def test_a_name_that_no_request_may_have_is_refused_also_with_the_right_mac(name: bytes) -> None:
    origin = Origin(seed=1, nonce=bytes(16), created_unix_s=1, request_id="x" * len(name))
    packed = origin.packed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Origin, "packed", lambda _: packed[: -len(name)] + name)
        ids = EventIds(origin, [Shown()], key=b"k", digest=bytes(32))
    forged = ids.after(0, Shown(3, 3)).decode()
    with pytest.raises(WrongEventId):
        opened(forged, key=b"k", digest=bytes(32), num_choices=1)


def test_without_a_key_an_id_that_was_made_elsewhere_is_refused(api: Api) -> None:
    body = {"prompt": "x", "stream": True}
    fields = CompletionFields.model_validate(body)
    digest = digest_of(fields, model=MODEL)
    key = hmac.digest(b"", b"anyone", "sha256")
    origin = Origin(seed=1, nonce=bytes(16), created_unix_s=1, request_id="mine")
    forged = EventIds(origin, [Shown()], key=key, digest=digest).after(0, Shown(3, 3))
    answer = api.http.post(COMPLETION, json=body, headers={"Last-Event-ID": forged})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == str(WrongEventId())


@contextmanager
def _service(
    key: str | None, *, model: str = "toy", event_key: bytes | None = None
) -> Iterator[tuple[str, ToyEngine]]:
    engine = ToyEngine(vocab_size=128)
    options = {} if event_key is None else {"event_key": event_key}
    app = toy_api(
        engine, model_name=model, max_model_len=100, limits=LIMITS, api_key=key, **options
    )
    with serving(app) as url:
        yield url, engine


def _asked(url: str, *, key: str, after: str = "") -> httpx.Response:
    id_headers = {"Last-Event-ID": after} if after else WITH_IDS
    headers = {"Authorization": f"Bearer {key}", **id_headers}
    body = {"prompt": "x", "stream": True, "request_id": "mine", "max_tokens": 16}
    return httpx.post(f"{url}{COMPLETION}", json=body, headers=headers, timeout=20)


def test_a_stream_goes_on_at_another_ingress_with_its_key_and_with_no_other() -> None:
    with _service("one") as (a, _), _service("one") as (b, _), _service("two") as (c, engine):
        whole = parsed(_asked(a, key="one").text)
        suffix = parsed(_asked(b, key="one", after=whole[1].id).text)
        assert folded(whole[:2] + suffix) == folded(whole)
        response = _asked(c, key="two", after=whole[1].id)
        assert response.status_code == 400
        assert response.json()["error"]["message"] == str(WrongEventId())
        assert not engine.requests


def test_without_a_key_a_stream_goes_on_at_another_ingress_of_the_service() -> None:
    event_key, other_key = b"1" * 32, b"2" * 32
    with (
        _service(None, event_key=event_key) as (a, _),
        _service(None, event_key=event_key) as (b, _),
        _service(None, event_key=other_key) as (after_a_restart, engine),
    ):
        whole = parsed(_asked(a, key="any").text)
        suffix = parsed(_asked(b, key="any", after=whole[1].id).text)
        assert folded(whole[:2] + suffix) == folded(whole)
        response = _asked(after_a_restart, key="any", after=whole[1].id)
        assert response.status_code == 400
        assert "since the service was started" in response.json()["error"]["message"]
        assert not engine.requests


def test_an_id_of_another_model_is_refused() -> None:
    key = b"1" * 32
    with (
        _service(None, event_key=key) as (a, _),
        _service(None, model="other", event_key=key) as (b, engine),
    ):
        last = parsed(_asked(a, key="any").text)[1].id
        assert _asked(b, key="any", after=last).status_code == 400
        assert not engine.requests


def test_a_reader_whose_stream_was_resumed_elsewhere_gets_one_error(api: Api) -> None:
    api.engine.breaks_after, api.engine.breakage = 3, ResumedElsewhere()
    events = _events(api, COMPLETION, {"prompt": "x"})
    assert [event.chunk["error"]["code"] for event in events[1:-1]] == ["resumed_elsewhere"]
    api.engine.refusal = ResumedElsewhere()
    answer = api.post(COMPLETION, {"prompt": "x", "stream": True})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "resumed_elsewhere")


def test_the_example_of_the_quickstart_prints_the_whole_text(
    api: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[4] / "docs" / "quickstart.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (example,) = [block for block in blocks if "Last-Event-ID" in block]
    api.says("the lazy dog sleeps")
    api.engine.group = 1
    with _cutting(api.url, after_events=3) as url:
        exec(compile(example.replace("http://127.0.0.1:8000", url), "quickstart", "exec"), {})
    assert capsys.readouterr().out == "the lazy dog sleeps"
    assert len(api.engine.requests) > 2


@contextmanager
def _cutting(url: str, *, after_events: int) -> Iterator[str]:
    """A proxy that breaks each connection after some events."""

    async def forward(request: Request) -> StreamingResponse:
        body = await request.body()
        headers = {k: v for k, v in request.headers.items() if "event-id" in k}

        async def part() -> AsyncIterator[bytes]:
            num_events = 0
            async with (
                httpx.AsyncClient(base_url=url) as client,
                client.stream(
                    "POST",
                    COMPLETION,
                    content=body,
                    headers={**headers, "Content-Type": "application/json"},
                ) as answer,
            ):
                async for line in answer.aiter_lines():
                    yield f"{line}\n".encode()
                    num_events += line.startswith("data: {")
                    if num_events > after_events:
                        raise ConnectionError("this proxy goes away")

        return StreamingResponse(part(), media_type="text/event-stream")

    with serving(Starlette(routes=[Route(COMPLETION, forward, methods=["POST"])])) as proxy_url:
        yield proxy_url
