"""The service without HTTP: traces, and streams that are not read to the end."""

import asyncio
import json
from pathlib import Path

from eesd_dist.telemetry.tracing import Tracing, make_tracing
from serve_app.openai.preparation import Preparation
from serve_app.openai.schema import CompletionFields
from serve_app.openai.service import Service
from tests.support.toy_codec import ByteCodec
from tests.support.toy_engine import ToyEngine

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"


def _service(engine: ToyEngine, tracing: Tracing | None = None) -> Service:
    preparation = Preparation(ByteCodec(), model_name="toy", max_model_len=100)
    return Service(engine, codec=ByteCodec(), preparation=preparation, tracing=tracing)


async def _run(service: Service, *, chunks: int | None) -> None:
    fields = CompletionFields.model_validate({"prompt": "x", "max_tokens": 30, "n": 2})
    prepared = await service.prepared(fields, traceparent=TRACEPARENT)
    if chunks is None:
        await service.whole(prepared)
        return
    stream = service.events(prepared)
    for _ in range(chunks):
        await anext(stream)
    await stream.aclose()


def test_the_requests_span_stands_between_the_client_and_the_engine(tmp_path: Path) -> None:
    engine = ToyEngine(vocab_size=128)
    tracing = make_tracing(process="ingress", folder=tmp_path)
    asyncio.run(_run(_service(engine, tracing), chunks=None))
    tracing.close()
    exported = json.loads((tmp_path / "ingress.jsonl").read_text().splitlines()[0])
    span = exported["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    assert span["name"] == "text_completion toy"
    assert (span["traceId"], span["parentSpanId"]) == (TRACE, "b7ad6b7169203331")
    assert {r.traceparent for r in engine.requests} == {f"00-{TRACE}-{span['spanId']}-01"}


def test_a_stream_that_is_closed_early_leaves_nothing_running(tmp_path: Path) -> None:
    engine = ToyEngine(vocab_size=128, delay_s=0.001)
    tracing = make_tracing(process="ingress", folder=tmp_path)
    asyncio.run(_run(_service(engine, tracing), chunks=2))
    tracing.close()
    assert engine.num_live == 0
    assert sorted(engine.aborted) == sorted(request.request_id for request in engine.requests)
    assert (tmp_path / "ingress.jsonl").read_text().count('"text_completion toy"') == 1
