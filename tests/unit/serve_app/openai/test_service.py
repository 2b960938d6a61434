"""The service without HTTP: traces, and streams that are not read to the end."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from eesd_dist.errors import PromptTooLong
from eesd_dist.telemetry.tracing import Tracing, make_tracing
from eesd_dist.telemetry.tracing_options import TracingOptions
from serve_app.config import LimitsConfig
from serve_app.openai.api_settings import limits_of
from serve_app.openai.context import RequestContext
from serve_app.openai.schema import ChatFields, CompletionFields
from serve_app.openai.text_service import TextService
from serve_app.openai.work_queues import size_of_chat
from tests.support.toy_api import toy_preparation
from tests.support.toy_engine import ToyEngine

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"


def _service(engine: ToyEngine, tracing: Tracing | None = None) -> TextService:
    return TextService(engine, toy_preparation(), tracing=tracing)


async def _run(service: TextService, *, chunks: int | None) -> None:
    fields = CompletionFields.model_validate({"prompt": "x", "max_tokens": 30, "n": 2})
    prepared = await service.prepared(fields, RequestContext(traceparent=TRACEPARENT))
    if chunks is None:
        await service.whole(prepared)
        return
    stream = service.events(prepared)
    for _ in range(chunks):
        await anext(stream)
    await stream.aclose()


def test_the_requests_span_stands_between_the_client_and_the_engine(tmp_path: Path) -> None:
    engine = ToyEngine(vocab_size=128)
    tracing = make_tracing(TracingOptions(folder=str(tmp_path)), process="ingress")
    asyncio.run(_run(_service(engine, tracing), chunks=None))
    tracing.close()
    exported = json.loads((tmp_path / "ingress.jsonl").read_text().splitlines()[0])
    span = exported["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    assert span["name"] == "text_completion toy"
    assert (span["traceId"], span["parentSpanId"]) == (TRACE, "b7ad6b7169203331")
    assert {r.traceparent for r in engine.requests} == {f"00-{TRACE}-{span['spanId']}-01"}


def test_a_stream_that_is_closed_early_leaves_nothing_running(tmp_path: Path) -> None:
    engine = ToyEngine(vocab_size=128, delay_s=0.001)
    tracing = make_tracing(TracingOptions(folder=str(tmp_path)), process="ingress")
    asyncio.run(_run(_service(engine, tracing), chunks=2))
    tracing.close()
    assert engine.num_live == 0
    assert sorted(engine.aborted) == sorted(request.request_id for request in engine.requests)
    assert (tmp_path / "ingress.jsonl").read_text().count('"text_completion toy"') == 1


def test_choices_that_wait_for_others_of_their_request_are_not_refused_for_a_full_queue() -> None:
    engine = ToyEngine(vocab_size=128)
    limits = limits_of(LimitsConfig(), max_model_len=100, max_running=4)
    assert limits.max_choices_at_once == 2
    service = TextService(engine, toy_preparation(limits=limits))

    async def run() -> None:
        fields = CompletionFields.model_validate({"prompt": "x", "max_tokens": 3, "n": 4})
        await service.whole(await service.prepared(fields, RequestContext()))

    asyncio.run(run())
    assert [request.is_continued for request in engine.requests] == [False, False, True, True]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "x" * 5_000}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 5_000}]}]},
        {"messages": [{"role": "user", "content": "x", "reasoning_content": "x" * 5_000}]},
        {"messages": [{"role": "tool", "tool_calls": [{"arguments": {"a": ["x" * 5_000]}}]}]},
        {"messages": [{"role": "user"}], "chat_template_kwargs": {"bos_token": "x" * 5_000}},
        {"messages": [{"role": "user"}], "chat_template_kwargs": {"a": [1] * 5_000}},
    ],
)
def test_everything_that_a_template_may_render_counts_as_its_size(body: dict[str, Any]) -> None:
    fields = ChatFields.model_validate(body)
    assert size_of_chat(fields.messages, fields.chat_template_kwargs) > 5_000


def test_a_short_conversation_is_short() -> None:
    fields = ChatFields.model_validate({"messages": [{"role": "user", "content": "x"}]})
    assert size_of_chat(fields.messages, fields.chat_template_kwargs) < 100


def test_a_text_may_be_as_long_as_the_model_and_the_kv_pages_allow() -> None:
    held: list[int] = []
    preparation = toy_preparation(kv_tokens=lambda: held[-1] if held else None)
    fields = CompletionFields(model="toy", prompt="x" * 60, max_tokens=None)
    for kv_tokens, limit in ((None, 100), (64, 64), (400, 100)):
        held += [] if kv_tokens is None else [kv_tokens]
        assert preparation.max_model_len == limit
        (choice,) = preparation.completion(fields, RequestContext()).choices
        num_prompt = len(choice.request.prompt)
        assert choice.request.sampling.max_tokens == min(16, limit - num_prompt)
    held.append(60)
    with pytest.raises(PromptTooLong, match="59"):
        preparation.completion(fields, RequestContext())
