"""The cost of traces: ratios of blocks, and a bench that notices a changed text."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import pytest

from eesd_dist.telemetry.tracing import make_tracing
from eesd_dist.telemetry.tracing_options import TracingOptions
from eesd_dist.text.tokenizer import Tokenizer
from eesd_dist.types import Request
from serve_app.bench.options import TracingBenchOptions
from serve_app.bench.tracing import measure
from serve_app.bench.tracing.command import Collector
from serve_app.bench.tracing.measure import OFF, VARIANTS, Block, Services, rows_of, table
from tests.support.live_server import serving
from tests.support.tiny_service import write_tiny_service
from tests.support.toy_api import toy_api
from tests.support.toy_engine import ToyEngine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_service(tmp_path_factory.mktemp("bench") / "tiny")


@contextmanager
def toys(options: TracingBenchOptions, *, changed: str = "") -> Iterator[Services]:
    """Services of toy engines in this process; one of them may give other texts."""
    collector = Collector()
    traced = {
        "off": TracingOptions(),
        "kept": TracingOptions(max_traces_kept=4),
        "sent": TracingOptions(endpoint=collector.endpoint),
    }
    with ExitStack() as stack:
        urls = {}
        for name, each in traced.items():
            tracing = make_tracing(each, process=name)
            stack.callback(tracing.close)

            def script(request: Request, token: int = 65 + (name == changed)) -> list[int]:
                return [token] * request.sampling.max_tokens

            tokenizer = Tokenizer.load(options.model)
            engine = ToyEngine(script=script)
            app = toy_api(engine, max_model_len=5000, tracing=tracing, tokenizer=tokenizer)
            urls[name] = stack.enter_context(serving(app))
        clock = count(1)
        yield Services(
            urls=urls, num_spans=collector.num_spans, cpu_seconds=lambda: float(next(clock))
        )
        collector.close()


def test_it_asks_every_variant_and_counts_what_the_collector_got(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = TracingBenchOptions(model=model, concurrency=3, max_tokens=4, quick=True)
    assert measure.run(options, start=toys) == 0
    *_, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    assert [row["variant"] for row in report["rows"]] == [variant.name for variant in VARIANTS]
    # Two spans in the ingress of each: all of two blocks of three requests, and the first of those
    # of which one in a hundred is traced. The toy makes no rounds.
    assert report["spans_received"] == 2 * (2 * 3 + 1)
    assert report["rows"][0]["speed"] == [1.0, 1.0, 1.0]
    assert report["texts_changed"] == 0


def test_a_changed_text_is_a_failure(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = TracingBenchOptions(model=model, concurrency=1, max_tokens=2, quick=True)
    assert measure.run(options, start=lambda given: toys(given, changed="sent")) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["texts_changed"] == 1


def test_a_variant_is_compared_with_the_same_turn_without_tracing() -> None:
    def blocks(*seconds: float, cpu_s: float) -> list[Block]:
        return [Block(seconds=s, cpu_s=cpu_s, num_tokens=100, texts=()) for s in seconds]

    rows = rows_of(
        {OFF: blocks(1.0, 2.0, 4.0, cpu_s=1.0), VARIANTS[3]: blocks(2.0, 2.0, 5.0, cpu_s=1.5)}
    )
    assert rows[1].speed == (1.0, 0.5, 1.0)
    assert rows[1].cpu == (1.5, 1.5, 1.5)
    assert rows[1].tokens_per_s == 50.0
    assert table(rows).splitlines()[2].endswith("1.000 (0.500 to 1.000)   1.500 (1.500 to 1.500)")
