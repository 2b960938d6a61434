"""Requests with parameters that an engine cannot serve: one is refused, and the next is served."""

import math
from collections.abc import Iterator

import pytest

from eesd_dist.bundled_model import BUNDLED_MODEL
from eesd_dist.config import EngineConfig
from eesd_dist.engine.local import LocalEngine
from eesd_dist.errors import EngineError, RequestError
from eesd_dist.types import Request, RequestId, SamplingParams, TokenId


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    engine = LocalEngine(EngineConfig.model_validate({"model": {"path": BUNDLED_MODEL}}))
    yield engine
    engine.close()


def _request(name: str, sampling: SamplingParams) -> Request:
    return Request(request_id=RequestId(name), prompt=(TokenId(5),), sampling=sampling)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (SamplingParams(temperature=-1.0), "temperature is -1.0: give 0 or more"),
        (SamplingParams(temperature=math.nan), "temperature is nan"),
        (SamplingParams(top_p=1.5), "top_p is 1.5: give 0 to 1"),
        (SamplingParams(repetition_penalty=0.0), "repetition_penalty is 0.0: give more than 0"),
        (SamplingParams(presence_penalty=math.inf), "presence_penalty is inf"),
        (SamplingParams(logit_bias=((3, math.nan),)), "logit_bias of 3 is nan"),
        (SamplingParams(max_tokens=0), "max_tokens is 0: ask for at least 1"),
    ],
)
def test_parameters_out_of_range_are_refused(
    engine: LocalEngine, sampling: SamplingParams, message: str
) -> None:
    good, bad = _request("good", SamplingParams(max_tokens=2)), _request("bad", sampling)
    with pytest.raises(RequestError, match=message):
        engine.generate([good, bad])
    refusals: dict[str, str] = {}
    emissions = engine.stream(
        [bad, good], on_refusal=lambda name, error: refusals.update({name: str(error)})
    )
    assert {emission.request_id for emission in emissions} == {"good"}
    assert message in refusals["bad"]


def test_a_closed_engine_says_so(engine: LocalEngine) -> None:
    other = LocalEngine(EngineConfig.model_validate({"model": {"path": BUNDLED_MODEL}}))
    other.close()
    with pytest.raises(EngineError, match="closed"):
        other.generate([_request("a", SamplingParams())])
