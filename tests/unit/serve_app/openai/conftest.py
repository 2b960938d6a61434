"""The whole API over the toy engine, behind a real server, with a real tokenizer."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import httpx
import openai
import pytest

from eesd_dist.telemetry.metrics import RequestTimings
from eesd_dist.text import Tokenizer
from serve_app.config import LimitsConfig
from serve_app.openai.api_settings import limits_of
from serve_app.openai.middleware.http_metrics import HttpMetrics
from tests.support.live_server import serving
from tests.support.tiny_tokenizer import write_byte_level
from tests.support.toy_api import toy_api
from tests.support.toy_engine import ToyEngine

MODEL = "toy"
MAX_MODEL_LEN = 200
MAX_RUNNING = 32
LIMITS = limits_of(LimitsConfig(), max_model_len=MAX_MODEL_LEN, max_running=MAX_RUNNING)


@dataclass
class Api:
    """Where it listens, what stands behind it, and what it reported."""

    engine: ToyEngine
    tokenizer: Tokenizer
    url: str = ""
    illness: str | None = None
    observed: list[RequestTimings] = field(default_factory=list)

    @cached_property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20)

    @property
    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20
        )

    @cached_property
    def http(self) -> httpx.Client:
        # No connection outlives its answer: the server drops those on which a stream broke.
        limits = httpx.Limits(max_keepalive_connections=0)
        return httpx.Client(base_url=self.url, timeout=20, limits=limits)

    def post(self, path: str, body: object) -> httpx.Response:
        return self.http.post(path, json=body)

    def get(self, path: str) -> httpx.Response:
        return self.http.get(path)

    def says(self, text: str) -> None:
        """The engine will answer with this text and then end."""
        tokens = [*self.tokenizer.encode(text), self.tokenizer.eos_token_ids[0]]
        self.engine.script = lambda request: tokens


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = write_byte_level(tmp_path_factory.mktemp("tokenizer"))
    return Tokenizer.load(folder, max_tokens=MAX_MODEL_LEN)


@pytest.fixture(scope="session")
def served(tokenizer: Tokenizer) -> Iterator[Api]:
    """One server for all tests of this folder."""
    engine = ToyEngine()
    api = Api(engine=engine, tokenizer=tokenizer)

    async def health() -> str | None:
        return api.illness

    async def metrics() -> bytes:
        return b"eesd_num_requests_running 0\n"

    class Observer(HttpMetrics):
        def observe_request(self, timings: RequestTimings) -> None:
            api.observed.append(timings)

    app = toy_api(
        engine,
        tokenizer=tokenizer,
        model_name=MODEL,
        max_model_len=MAX_MODEL_LEN,
        limits=LIMITS,
        health=health,
        metrics=metrics,
        http_metrics=Observer(ingress="toy"),
    )
    with serving(app) as url:
        api.url = url
        with api.http, api.client:
            yield api


@pytest.fixture
def api(served: Api) -> Api:
    """The server with an engine that remembers nothing of the test before."""
    vars(served.engine).update(vars(ToyEngine(vocab_size=served.tokenizer.vocab_size)))
    served.illness = None
    served.observed = []
    return served
