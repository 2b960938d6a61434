"""The admission gate, piece by piece, and what it lets through."""

import asyncio
import json
import logging
import math
from dataclasses import replace

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from eesd_dist.errors import CapacityError, QueueFull, RequestError
from eesd_dist.parameters import check_json
from eesd_dist.text import Tokenizer
from serve_app.config import LimitsConfig, service_config
from serve_app.openai.api_settings import Limits, limits_of
from serve_app.openai.errors import HeadTooLarge
from serve_app.openai.keys import KeyRing, operators_key
from serve_app.openai.middleware import gate
from serve_app.openai.middleware.gate import AdmissionGate
from serve_app.openai.middleware.head_gate import MAX_HEAD_BYTES, check_head
from serve_app.openai.middleware.request_ids import NamedRequests
from serve_app.openai.text_service import Throughput
from serve_app.openai.work_queues import TextThreads
from tests.support.live_server import serving
from tests.support.toy_api import toy_api
from tests.support.toy_engine import ToyEngine
from tests.unit.serve_app.openai.conftest import Api

LIMITS = Limits(
    max_body_bytes=1000,
    max_json_depth=4,
    read_timeout_s=0.2,
    request_ttl_s=100.0,
    max_choices=8,
    max_choices_at_once=2,
    max_answer_extras=1000,
    strict_fields=False,
)
Json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='[]{}"\\a,é'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='[{"\\'), inner),
)


def _depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


@given(Json, st.booleans())
def test_the_depth_of_json_is_found_without_parsing_it(value: object, escaped: bool) -> None:
    body = json.dumps(value, ensure_ascii=escaped).encode()
    depth = _depth(value)
    check_json(body, max_depth=depth)
    if depth:
        with pytest.raises(RequestError, match=f"nested {depth} levels deep"):
            check_json(body, max_depth=depth - 1)


def test_unfinished_strings_are_scanned_once() -> None:
    escapes = b"[" * 10 + b'"' + b'\\"' * 500_000 + b"\\"
    with pytest.raises(RequestError, match="nested 10 levels"):
        check_json(escapes, max_depth=4)  # would take minutes if it were tried from every quote


def test_json_of_many_small_lists_is_refused() -> None:
    with pytest.raises(RequestError, match="20001 lists and objects"):
        check_json(b"[" + b"[]," * 19_999 + b"[]]", max_depth=4)
    check_json(json.dumps({"prompt": "[]," * 20_000}).encode(), max_depth=4)


def test_utf_16_cannot_hide_brackets() -> None:
    with pytest.raises(RequestError, match="NUL"):
        check_json('["\\\\""]'.encode("utf-16"), max_depth=4)


@pytest.mark.parametrize(
    ("path", "header"),
    [
        ("/a\nb", (b"x", b"y")),
        ("/a\x1b[31m", (b"x", b"y")),
        ("/", (b"x", b"\xff")),
        ("/", (b"\xc3", b"y")),
        ("/", (b"x", "a\u2028b".encode())),
        ("/", (b"x", b"a\x9fb")),
        ("/", (b"x-request-id", b"a b")),
        ("/", (b"x-request-id", "é".encode())),
        ("/", (b"x-request-id", b"")),
        ("/", (b"x-request-id", b"a" * 129)),
    ],
)
def test_what_could_forge_a_log_line_is_refused(path: str, header: tuple[bytes, bytes]) -> None:
    with pytest.raises(RequestError):
        check_head({"path": path, "headers": [header]})


def test_ordinary_headers_pass_and_large_ones_do_not() -> None:
    check_head(
        {"path": "/é", "headers": [(b"x-name", "Zoë\t1".encode()), (b"x-request-id", b"a-1")]}
    )
    with pytest.raises(HeadTooLarge):
        check_head({"path": "/", "headers": [(b"x", b"a" * MAX_HEAD_BYTES)]})


class _Sent:
    """An application behind the gate, and a client that sends it a body in parts."""

    def __init__(self, *chunks: bytes, length: int | None = None, key: bytes = b"") -> None:
        self._parts = list(chunks)
        self.bodies: list[bytes] = []
        self.status: int | None = None
        self.headers: dict[bytes, bytes] = {}
        length_header = [] if length is None else [(b"content-length", b"%d" % length)]
        self.scope = {
            "type": "http",
            "path": "/v1/completions",
            "headers": [
                *length_header,
                (b"transfer-encoding", b"chunked"),
                (b"authorization", b"Bearer " + key),
            ],
        }

    async def app(self, scope: object, receive: object, send: object) -> None:
        assert callable(receive)
        self.bodies.append((await receive())["body"])
        assert (await receive())["type"] == "http.disconnect"

    async def receive(self) -> Message:
        if not self._parts:
            return {"type": "http.disconnect"}
        chunk = self._parts.pop(0)
        if chunk == b"wait":
            await asyncio.sleep(math.inf)
        return {"type": "http.request", "body": chunk, "more_body": bool(self._parts)}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])

    def through(self, admission: AdmissionGate | None = None) -> "_Sent":
        admission = admission or AdmissionGate(self.app, limits=LIMITS, keys=None)
        asyncio.run(admission(self.scope, self.receive, self.send))
        return self


def test_a_body_arrives_in_one_piece_and_then_the_client_can_still_leave() -> None:
    assert _Sent(b'{"a"', b": 1", b"}").through().bodies == [b'{"a": 1}']


def test_a_stated_length_is_refused_before_a_byte_is_read() -> None:
    exchange = _Sent(b"wait", length=1001).through()
    assert (exchange.status, exchange.bodies) == (413, [])
    assert exchange.headers[b"connection"] == b"close"


def test_a_body_without_a_length_is_counted_while_it_arrives() -> None:
    assert _Sent(*[b" " * 100] * 10).through().bodies == [b" " * 1000]
    exchange = _Sent(*[b" " * 100] * 11, b"wait").through()
    assert (exchange.status, exchange.bodies) == (413, [])


def test_a_body_that_does_not_end_is_refused_after_the_deadline() -> None:
    exchange = _Sent(b"{", b"wait").through()
    assert (exchange.status, exchange.bodies) == (408, [])


def test_the_key_comes_before_the_body() -> None:
    exchange = _Sent(b"wait", key=b"wrong")
    exchange.through(
        AdmissionGate(exchange.app, limits=LIMITS, keys=KeyRing(operators_key("right")))
    )
    assert exchange.status == 401
    exchange = _Sent(b"{}", key=b"right")
    exchange.through(
        AdmissionGate(exchange.app, limits=LIMITS, keys=KeyRing(operators_key("right")))
    )
    assert exchange.bodies == [b"{}"]


def test_a_body_is_not_read_where_no_key_is_needed() -> None:
    reached = []

    async def app(*_: object) -> None:
        reached.append(True)

    exchange = _Sent(b"wait")
    exchange.scope["path"] = "/health"
    exchange.through(AdmissionGate(app, limits=LIMITS, keys=KeyRing(operators_key("right"))))
    assert (exchange.status, reached) == (None, [True])


def test_bodies_that_arrive_together_share_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_MAX_BODIES_IN_MEMORY", 2)
    monkeypatch.setattr(gate, "_SMALL_BODY_BYTES", 100)
    first = _Sent(b" " * 900, b"wait")
    admission = AdmissionGate(first.app, limits=LIMITS, keys=None)

    async def all_of_them() -> tuple[int | None, ...]:
        exchanges = [
            first,
            _Sent(b" " * 900, b"wait"),
            _Sent(b" " * 900, b"wait"),
            _Sent(b" " * 100),
        ]
        await asyncio.gather(*(admission(s.scope, s.receive, s.send) for s in exchanges))
        after = _Sent(*[b" " * 500] * 2)
        after.app = exchanges[3].app = first.app  # type: ignore[method-assign]
        await admission(after.scope, after.receive, after.send)
        return tuple(s.status for s in (*exchanges, after))

    assert asyncio.run(all_of_them()) == (408, 408, 429, None, None)
    assert first.bodies == [b" " * 100, b" " * 1000]


def test_a_refusal_is_one_short_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    exchange = _Sent(b"[" * 900)
    exchange.scope["path"] = "/" + "x" * 5000 + "\n"
    exchange.through()
    assert exchange.status == 400
    (record,) = caplog.records
    assert len(record.getMessage()) < 400
    assert "\n" not in record.getMessage()


def test_guesses_at_a_key_take_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    exchange = _Sent(b"{}", key=b"wrong")
    admission = AdmissionGate(exchange.app, limits=LIMITS, keys=KeyRing(operators_key("right")))
    app = NamedRequests(admission, routes=())

    async def guess() -> None:
        for _ in range(50):
            await app(dict(exchange.scope), exchange.receive, exchange.send)

    asyncio.run(guess())
    assert exchange.status == 401
    (line,) = caplog.messages
    assert line.startswith("request refused: client=")


def test_a_body_takes_sixteen_bytes_for_each_token_of_the_model() -> None:
    small = limits_of(LimitsConfig(), max_model_len=2048, max_running=32)
    large = limits_of(LimitsConfig(), max_model_len=131_072, max_running=32)
    assert small.max_body_bytes == 2**20 + 16 * 2048
    assert large.max_body_bytes == 2**20 + 16 * 131_072
    config = LimitsConfig(max_body_bytes=5, max_choices=3)
    limits = limits_of(config, max_model_len=2048, max_running=1)
    assert (limits.max_body_bytes, limits.max_choices, limits.max_choices_at_once) == (5, 3, 1)


def test_updated_limits_hold_for_the_next_request(tokenizer: Tokenizer) -> None:
    limits = replace(LIMITS)
    app = toy_api(ToyEngine(), tokenizer=tokenizer, max_model_len=200, limits=limits)
    body = {"prompt": ["a", "b"], "max_tokens": 1}
    with serving(app) as url, httpx.Client(base_url=url, timeout=20) as client:
        assert client.post("/v1/completions", json=body).status_code == 200
        limits.update(replace(LIMITS, max_choices=1))
        assert client.post("/v1/completions", json=body).status_code == 400
        limits.update(replace(LIMITS, max_body_bytes=5))
        assert client.post("/v1/completions", json=body).status_code == 413


def test_limits_that_contradict_each_other_are_refused() -> None:
    tree: dict[str, object] = {
        "engine": {"model": {"path": "/m"}},
        "limits": {"read_timeout_s": 5, "request_ttl_s": 5},
    }
    with pytest.raises(Exception, match="raise request_ttl_s"):
        service_config(tree)


@pytest.mark.parametrize(
    ("prompt", "n", "is_served"),
    [("a", 128, True), (["a"] * 64, 2, True), (["a"] * 129, 1, False), (["a"] * 65, 2, False)],
)
def test_prompts_times_n_are_bounded(api: Api, prompt: object, n: int, is_served: bool) -> None:
    body = {"prompt": prompt, "n": n, "max_tokens": 1}
    answer = api.post("/v1/completions", body)
    assert answer.status_code == (200 if is_served else 400)
    if not is_served:
        message = answer.json()["error"]["message"]
        assert "expected at most 128" in message
        assert "limits.max_choices" in message


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x" * 500_000}, "prompt"),
        ("/v1/completions", {"prompt": ["x" * 500_000]}, "prompt"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x" * 500_000}]},
            "messages",
        ),
        ("/tokenize", {"prompt": "x" * 500_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 500_000}]}, "messages"),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    api: Api, path: str, body: object, param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: object, **__: object) -> None:
        raise AssertionError("tokenised")

    monkeypatch.setattr(api.tokenizer._backend, "encode", encode)
    error = api.post(path, body).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: found a text of 5")


def test_no_more_tokens_are_turned_into_text_than_fit_an_answer(api: Api) -> None:
    answer = api.post("/detokenize", {"tokens": [7] * 32_769})
    assert "found 32769 tokens, expected at most 32768" in answer.json()["error"]["message"]
    assert api.post("/detokenize", {"tokens": [7] * 32_768}).status_code == 200


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"logit_bias": {str(i): 1.0 for i in range(1025)}}, "logit_bias"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 1025}, "stop"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": "a\x1b[0m"}, "request_id"),
        ({"request_id": "a" * 129}, "request_id"),
        ({str(i): 1 for i in range(1025)}, None),
        ({"speculation": {str(i): 1 for i in range(1025)}}, "speculation"),
    ],
)
def test_numbers_and_lengths_of_fields_are_bounded(
    api: Api, extra: dict[str, object], param: str | None
) -> None:
    answer = api.post("/v1/completions", {"prompt": "x", **extra})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_the_names_of_ignored_fields_forge_no_line(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert api.post("/v1/completions", {"prompt": "x", "a\nrequest lost": 1}).status_code == 200
    (line,) = [r.getMessage() for r in caplog.records if "ignored" in r.getMessage()]
    assert line == r"fields of a request were ignored: names=['a\nrequest lost']"


def test_work_on_long_texts_is_bounded_and_short_texts_do_not_wait() -> None:
    async def refused() -> int:
        threads = TextThreads()
        over = asyncio.Event()
        loop = asyncio.get_running_loop()

        def work() -> None:
            asyncio.run_coroutine_threadsafe(over.wait(), loop).result()

        waiting = [asyncio.ensure_future(threads.run(work, size=10_000)) for _ in range(64)]
        await asyncio.sleep(0)
        assert await threads.run(lambda: 1, size=10) == 1
        with pytest.raises(CapacityError, match="64 long texts"):
            await threads.run(work, size=10_000)
        over.set()
        await asyncio.gather(*waiting)
        return await threads.run(lambda: 2, size=10_000)

    assert asyncio.run(refused()) == 2


def test_a_refused_request_waits_as_long_as_the_live_ones_take() -> None:
    clock_s = 0.0
    throughput = Throughput(clock=lambda: clock_s)
    assert throughput.retry_after_s() == 1.0, "nothing is known"
    throughput.started(50)
    clock_s = 10.0
    throughput.ended(20)
    assert throughput.retry_after_s() == pytest.approx(30 * 10 / 20)
    throughput.started(500)
    throughput.ended(0, num_empty=500)
    assert throughput.retry_after_s() == pytest.approx(30 * 10 / 20), "refusals are no ends"
    throughput.started(1000)
    assert throughput.retry_after_s() == 60.0
    throughput.ended(1030)
    assert throughput.retry_after_s() == 1.0
    throughput.started(3)
    clock_s = 100.0
    assert throughput.retry_after_s() == 60.0, "nothing has ended within a minute"


def test_a_full_queue_says_when_to_come_back(api: Api) -> None:
    api.engine.refusal = QueueFull(num_waiting=256, limit=256)
    answer = api.post("/v1/completions", {"prompt": "x"})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")


def test_refused_requests_do_not_shorten_what_the_next_ones_are_told(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
    api.engine.refusal = QueueFull(num_waiting=256, limit=256)
    ended = []
    monkeypatch.setattr(
        Throughput, "ended", lambda _, num, *, num_empty=0: ended.append((num, num_empty))
    )
    assert api.post("/v1/completions", {"prompt": "x", "n": 3}).status_code == 429
    assert ended == [(0, 3)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_ends_when_its_time_is_over(tokenizer: Tokenizer, stream: bool) -> None:
    engine = ToyEngine(vocab_size=tokenizer.vocab_size)
    engine.stalls_after = 15
    with serving(_api(engine, tokenizer, ttl_s=2.5)) as url:
        body = {"prompt": "x", "max_tokens": 60, "stream": stream}
        answer = httpx.post(f"{url}/v1/completions", json=body)
        error = json.loads(answer.text.split("data: ")[-2] if stream else answer.text)["error"]
        assert error["code"] == "request_expired"
        assert "not finished within 2.5 s" in error["message"]
        assert (answer.status_code, answer.text.count('"text"')) == (
            (200, 5) if stream else (503, 0)
        )
        assert stream or answer.headers["retry-after"] == "1"
        assert engine.num_live == 0
        assert len(engine.aborted) == 1
        engine.stalls_after = None
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200


def test_a_request_that_waits_for_its_first_token_ends_too(tokenizer: Tokenizer) -> None:
    engine = ToyEngine(vocab_size=tokenizer.vocab_size, delay_s=100.0)
    with serving(_api(engine, tokenizer, ttl_s=0.2)) as url:
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "stream": True, "n": 2})
        assert (answer.status_code, engine.num_live) == (503, 0)


def _api(engine: ToyEngine, tokenizer: Tokenizer, *, ttl_s: float) -> FastAPI:
    limits = replace(LIMITS, request_ttl_s=ttl_s)
    return toy_api(engine, tokenizer=tokenizer, max_model_len=200, limits=limits)
