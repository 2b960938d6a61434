"""Requests to a checkpoint that names values of sampling in generation_config.json."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from eesd_dist.text.sampling_defaults import SamplingDefaults
from eesd_dist.types import SamplingParams
from tests.support.live_server import serving
from tests.support.toy_api import toy_api
from tests.support.toy_engine import ToyEngine

DEFAULTS = SamplingDefaults(
    temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.05, max_new_tokens=12
)
BODIES = {
    "/v1/completions": {"prompt": "abc"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}]},
    "/v1/responses": {"input": "abc"},
}


class Site:
    def __init__(self, url: str, engine: ToyEngine) -> None:
        self.url, self._engine = url, engine

    def sampling(self, path: str, **fields: object) -> SamplingParams:
        """Returns what the engine is asked for."""
        self._engine.requests.clear()
        answer = httpx.post(self.url + path, json=BODIES[path] | fields, timeout=20)
        assert answer.status_code == 200, answer.text
        return self._engine.requests[0].sampling


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    engine = ToyEngine(vocab_size=128)
    app = toy_api(engine, max_model_len=100, sampling_defaults=DEFAULTS)
    with serving(app) as url:
        yield Site(url, engine)


@pytest.mark.parametrize("path", BODIES)
def test_a_request_that_states_none_has_those_of_the_checkpoint(site: Site, path: str) -> None:
    sampling = site.sampling(path)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.9, 20)
    assert sampling.repetition_penalty == 1.05
    assert sampling.min_p == 0.0
    assert sampling.max_tokens == 12


@pytest.mark.parametrize("path", BODIES)
def test_what_a_request_states_counts_also_where_it_is_our_default(site: Site, path: str) -> None:
    sampling = site.sampling(path, temperature=1.0, top_p=1.0)
    assert (sampling.temperature, sampling.top_p) == (1.0, 1.0)
    assert site.sampling(path, temperature=None).temperature == 0.6


def test_no_answer_is_longer_than_the_checkpoint_says(site: Site) -> None:
    assert site.sampling("/v1/completions", max_tokens=5).max_tokens == 5
    assert site.sampling("/v1/completions", max_tokens=50).max_tokens == 12
    chat = "/v1/chat/completions"
    assert site.sampling(chat, max_completion_tokens=50).max_tokens == 12
    assert site.sampling(chat, max_completion_tokens=3, max_tokens=50).max_tokens == 3


def test_the_card_of_the_model_shows_them(site: Site) -> None:
    (card,) = httpx.get(f"{site.url}/v1/models", timeout=20).json()["data"]
    expected: dict[str, Any] = DEFAULTS.stated()
    assert card["default_sampling_params"] == expected
