"""Which counts of requests are kept, and that each request counts once."""

from collections.abc import Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families

from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.types import (
    Emission,
    FinishReason,
    Request,
    RequestId,
    SamplingParams,
    TokenId,
)
from eesd_dist.workers.watch import DraftWatch
from tests.support.toy_stages import ToyStep

REQUEST = Request(
    request_id=RequestId("r"), prompt=(TokenId(1), TokenId(2)), sampling=SamplingParams()
)


@pytest.fixture
def watch() -> DraftWatch:
    return DraftWatch(Tracing(), model_name="toy")


def _counts(watch: DraftWatch) -> Mapping[str, float]:
    suffixes = ("prompt_tokens_total", "request_success_total", "time_to_first_token_seconds_count")
    counts: dict[str, float] = {}
    for family in text_string_to_metric_families(watch.page(None).decode()):
        for sample in family.samples:
            name = next((name for name in suffixes if sample.name.endswith(name)), None)
            if name is not None and sample.value:
                counts[sample.labels.get("finished_reason", name)] = sample.value
    return counts


def _step(*, finish_reason: FinishReason | None = None) -> ToyStep:
    emission = Emission(
        request_id=REQUEST.request_id,
        tokens=(TokenId(5),),
        num_accepted=0,
        finish_reason=finish_reason,
    )
    return ToyStep(emissions=(emission,))


def test_a_request_that_is_sent_on_and_returns_counts_once(watch: DraftWatch) -> None:
    watch.arrived(REQUEST)
    watch.saw(_step())
    watch.sent_on(REQUEST.request_id)
    watch.left(REQUEST.request_id)
    once = {"prompt_tokens_total": 2, "time_to_first_token_seconds_count": 1}
    assert _counts(watch) == once
    resumed = Request(
        request_id=REQUEST.request_id,
        prompt=REQUEST.prompt,
        sampling=REQUEST.sampling,
        generated=(TokenId(5),),
    )
    watch.arrived(resumed)
    watch.saw(_step(finish_reason=FinishReason.LENGTH))
    assert _counts(watch) == {**once, "length": 1}


def test_a_request_without_a_reader_is_an_abort(watch: DraftWatch) -> None:
    watch.arrived(REQUEST)
    watch.left(REQUEST.request_id)
    assert _counts(watch) == {"prompt_tokens_total": 2, "abort": 1}
