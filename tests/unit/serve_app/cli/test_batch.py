"""`eesd batch --url` over the whole API in front of a toy, and what makes two runs the same."""

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from eesd_dist.config import EngineConfig
from eesd_dist.errors import ConfigError, EngineError, PoisonRequest
from eesd_dist.text import Tokenizer
from serve_app.batch.job import BatchOptions, BatchReport
from serve_app.batch.local_engine import identity_of
from serve_app.batch.record_files import errors_path_of
from serve_app.batch.start import run_over_http
from serve_app.cli import main as cli
from serve_app.cli.batch import defaults_of
from tests.support.live_server import serving
from tests.support.tiny_tokenizer import write_byte_level
from tests.support.toy_api import toy_api
from tests.support.toy_engine import ToyEngine


class _Proxy:
    """Serve's: a route that was deleted is 404, at once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.has_route = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.has_route or scope["path"] == "/v1/models":
            await self._app(scope, receive, send)
        else:
            gone = PlainTextResponse(f"Path '{scope['path']}' not found.", status_code=404)
            await gone(scope, receive, send)


@dataclass
class Job:
    """Files of one job, and the service it asks."""

    folder: Path
    engine: ToyEngine
    proxy: _Proxy
    url: str = ""

    @property
    def rows(self) -> Path:
        return self.folder / "in.jsonl"

    @property
    def out(self) -> Path:
        return self.folder / "out.jsonl"

    def write(self, *bodies: object) -> None:
        lines = [json.dumps({"id": f"r{i}", **body}) for i, body in enumerate(bodies)]  # type: ignore[dict-item]
        self.rows.write_text("\n".join(lines) + "\n")

    def run(self) -> BatchReport:
        options = BatchOptions(show_progress=False)
        files = (str(self.rows), str(self.out))
        run = run_over_http(*files, url=self.url, api_key=None, options=options, concurrency=4)
        return asyncio.run(run)

    def typed(self, *words: str) -> int:
        """The exit status of `eesd batch`."""
        files = (str(self.rows), str(self.out))
        return cli.main(["batch", *files, "--url", self.url, "--quiet", *words])


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    model = write_byte_level(tmp_path / "model")
    engine = ToyEngine(vocab_size=320)
    proxy = _Proxy(toy_api(engine, tokenizer=Tokenizer.load(model), max_model_len=200))
    with serving(proxy) as url:
        yield Job(folder=tmp_path, engine=engine, proxy=proxy, url=url)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.batch.loop._FIRST_PAUSE_S", 0.001)


def test_a_route_that_is_away_ends_the_job_and_costs_no_row(job: Job) -> None:
    job.write(*({"prompt": f"row {i}"} for i in range(40)))
    job.proxy.has_route = False
    with pytest.raises(EngineError, match=r"20 rows in a row .* HTTP 404 .*check --url"):
        job.run()
    job.proxy.has_route = True
    report = job.run()
    assert (report.num_skipped, report.num_completed) == (0, 40)


def test_a_row_that_the_service_calls_poison_is_sent_once(job: Job) -> None:
    job.write({"prompt": "x"})
    job.engine.refusal = PoisonRequest(request_id="r", crashes=2, reason="a bug")
    assert job.run().num_failed == 1
    assert job.run().num_failed_before == 1
    assert len(job.engine.requests) == 1
    record = json.loads(errors_path_of(job.out).read_text())
    assert "do not send this one again" in record["error"]["message"]


def test_a_job_with_failed_rows_does_not_end_well_however_often_it_is_run(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write({"prompt": "x"}, {"prompt": 3.5})
    assert job.typed() == 1
    assert "1 answered, 1 failed" in capsys.readouterr().out
    assert job.typed() == 1
    output = capsys.readouterr().out
    assert "2 done before, 0 answered, 0 failed" in output
    assert "1 of those done before had failed" in output
    job.write({"prompt": "x"}, {"prompt": "y"})
    assert job.typed() == 0
    assert "1 done before, 1 answered, 0 failed" in capsys.readouterr().out


def test_no_row_at_a_time_is_no_job(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.write({"prompt": "x"})
    assert job.typed("--concurrency", "0") == 2
    assert capsys.readouterr().err.startswith("eesd: --concurrency 0: expected 1 or more")


def test_defaults_are_read_as_yaml_and_quoted_texts_stay_texts() -> None:
    assert defaults_of(["stop='#'", 'user="2026-01-01"', 'logit_bias={"5": 10}', "seed=null"]) == {
        "stop": "#",
        "user": "2026-01-01",
        "logit_bias": {"5": 10},
        "seed": None,
    }
    with pytest.raises(ConfigError, match=r"^--default stop: expected FIELD=VALUE$"):
        defaults_of(["stop"])


@pytest.mark.parametrize(
    "setting", ["user=2026-01-01", "logit_bias={5: 10}", "temperature=.nan", "stop=!!set {a}"]
)
def test_a_default_is_something_that_json_has_a_form_for(setting: str) -> None:
    complaint = rf"^--default {re.escape(setting)}: found .*, which JSON has no form for"
    with pytest.raises(ConfigError, match=complaint):
        defaults_of([setting])


def test_the_service_gets_rows_as_they_are_and_its_answers_are_the_records(job: Job) -> None:
    messages = [{"role": "user", "content": "hello"}]
    job.write({"prompt": "x", "logprobs": 1, "max_tokens": 3}, {"messages": messages})
    assert job.run().num_failed == 0
    text, chat = (json.loads(line)["response"]["body"] for line in job.out.read_text().splitlines())
    if text["object"] != "text_completion":
        text, chat = chat, text
    assert len(text["choices"][0]["logprobs"]["tokens"]) == 3
    assert chat["choices"][0]["message"]["role"] == "assistant"


def test_a_row_of_another_model_is_its_own_error(job: Job) -> None:
    job.write({"prompt": "x", "model": "gpt"}, {"prompt": "x", "model": "toy"}, {"prompt": "x"})
    report = job.run()
    assert (report.num_completed, report.num_failed) == (2, 1)
    assert "the model 'gpt' is not served here" in errors_path_of(job.out).read_text()
    assert job.run().num_failed_before == 1


def test_options_of_an_engine_are_refused_where_none_runs(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write({"prompt": "x"})
    assert job.typed("--model", "elsewhere", "--verify-tp", "2") == 2
    assert capsys.readouterr().err.startswith("eesd: --model, --verify-tp: found together with")


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "tokenizer_config.json", "generation_config.json"]
)
def test_what_makes_and_ends_texts_is_part_of_a_runs_identity(tmp_path: Path, name: str) -> None:
    model = write_byte_level(tmp_path)
    config = EngineConfig.model_validate({"model": {"path": model, "dtype": "bfloat16"}})
    before = identity_of(config, max_model_len=64)
    assert identity_of(config, max_model_len=64) == before
    file = model / name
    file.write_text((file.read_text() if file.exists() else "{}") + " ")
    assert identity_of(config, max_model_len=64) != before


def test_texts_of_rejection_sampling_are_other_texts(tmp_path: Path) -> None:
    model = write_byte_level(tmp_path)
    tree: dict[str, object] = {"model": {"path": model, "dtype": "bfloat16"}}
    rejection = EngineConfig.model_validate({**tree, "speculation": {"acceptance": "rejection"}})
    assert identity_of(rejection, max_model_len=64) != identity_of(
        EngineConfig.model_validate(tree), max_model_len=64
    )
