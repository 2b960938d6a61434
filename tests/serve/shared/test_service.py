"""The service as its users meet it: HTTP in, text out, over actors and their links."""

import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from eesd_dist.engine.local import LocalEngine
from eesd_dist.telemetry import names
from eesd_dist.text import Tokenizer
from eesd_dist.types import Request, RequestId, SamplingParams, SpeculationParams
from serve_app.cli.main import main
from tests.support.running import Running, tokens_of, until
from tests.support.spans import WrittenSpan, read_spans

PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def client(service: Running) -> Iterator[openai.OpenAI]:
    # Less than the service's own patience: what hangs there fails here.
    with openai.OpenAI(
        base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=100.0
    ) as client:
        yield client


def test_a_completion_is_the_text_that_plain_decoding_in_one_process_gives(
    client: openai.OpenAI, service: Running
) -> None:
    parameters = {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.3}
    answer = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=48,
        seed=11,
        extra_body={"ignore_eos": True, "return_token_ids": True},
        **parameters,
    )
    served = answer.choices[0].model_extra or {}
    tokenizer = Tokenizer.load(service.config.engine.model.path)
    parallel = service.config.engine.parallel.model_copy(update={"verify_tensor_parallel_size": 1})
    llm = LocalEngine(service.config.engine.model_copy(update={"parallel": parallel}))
    plain = Request(
        request_id=RequestId("plain"),
        prompt=tokenizer.encode(PROMPT),
        sampling=SamplingParams(max_tokens=48, seed=11, **parameters),
        speculation=SpeculationParams(mode="off"),
    )
    assert served["token_ids"] == llm.generate([plain])[0].tokens
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 48


def test_speculation_off_and_on_give_the_same_text(client: openai.OpenAI) -> None:
    texts, accepted = [], []
    for mode in ("off", "auto"):
        answer = client.completions.create(
            model="tiny",
            prompt=PROMPT,
            max_tokens=64,
            temperature=0.7,
            seed=3,
            extra_body={"ignore_eos": True, "speculation": {"mode": mode, "controller": "fixed"}},
        )
        texts.append(answer.choices[0].text)
        statistics = (answer.model_extra or {})["metrics"]["speculative_decoding"]
        accepted.append(statistics and statistics["num_accepted_draft_tokens"])
    assert texts[0] == texts[1]
    assert accepted[0] is None
    assert accepted[1] > 0


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def test_an_answer_matches_its_schema_with_speculation_off_and_on(client: openai.OpenAI) -> None:
    """Over two verify ranks, each with a part of the vocabulary; streamed too."""
    texts = []
    for mode, stream in (("off", False), ("auto", False), ("auto", True)):
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "who is it?"}],
            max_tokens=150,
            temperature=0.8,
            seed=21,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": SCHEMA},
            },
            stream=stream,
            extra_body={"speculation": {"mode": mode, "controller": "fixed"}},
        )
        if isinstance(answer, openai.Stream):
            chunks = [chunk.choices[0] for chunk in answer if chunk.choices]
            texts.append("".join(chunk.delta.content or "" for chunk in chunks))
            assert chunks[-1].finish_reason == "stop"
        else:
            texts.append(answer.choices[0].message.content or "")
            assert answer.choices[0].finish_reason == "stop"
    assert texts[0] == texts[1] == texts[2]
    jsonschema.validate(json.loads(texts[0]), SCHEMA)


def test_a_grammar_that_cannot_be_used_is_refused_and_one_that_fails_ends_its_request(
    client: openai.OpenAI, service: Running
) -> None:
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.completions.create(
            model="tiny", prompt=PROMPT, extra_body={"guided_json": {"uniqueItems": True}}
        )
    deep = "(?:(?:(?:a{0,100}){0,100}){0,100})b"
    (a,) = Tokenizer.load(service.config.engine.model.path).encode("a", add_special_tokens=False)
    with pytest.raises(openai.BadRequestError, match="more work than is allowed"):
        client.completions.create(
            model="tiny",
            prompt=PROMPT,
            max_tokens=200,
            logit_bias={str(a): 100},
            extra_body={"guided_regex": deep},
        )
    next_answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=3, extra_body={"ignore_eos": True}
    )
    assert next_answer.usage is not None
    assert next_answer.usage.completion_tokens == 3


def test_a_streamed_chat_is_the_chat_that_is_not_streamed(client: openai.OpenAI) -> None:
    def ask(*, stream: bool) -> object:
        return client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "where did the cat sit?"}],
            max_tokens=40,
            seed=5,
            stream=stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        )

    chunks = list(ask(stream=True))  # type: ignore[call-overload]
    whole = ask(stream=False)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content  # type: ignore[attr-defined]
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens  # type: ignore[attr-defined]


def test_eight_choices_are_eight_texts_and_the_first_is_the_one_of_n_1(
    client: openai.OpenAI,
) -> None:
    def texts(n: int) -> list[str]:
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=24, temperature=1.0, seed=8, n=n
        )
        return [choice.text for choice in answer.choices]

    eight = texts(8)  # at once: Serve has to tell them apart
    assert len(set(eight)) == 8
    assert eight[0] == texts(1)[0]


def test_every_token_has_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "the dog"}],
        max_tokens=12,
        temperature=0.0,
        logprobs=True,
        top_logprobs=3,
        extra_body={"ignore_eos": True},
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 12
    for token in logprobs.content:
        best = token.top_logprobs[0]
        assert len(token.top_logprobs) == 3
        assert best.logprob == pytest.approx(token.logprob, abs=1e-4)  # greedy takes the best
        assert token.logprob <= 0.0


def test_an_echoed_text_has_the_log_probabilities_it_was_generated_with(
    client: openai.OpenAI,
) -> None:
    """Over two verify ranks. As evaluation harnesses ask: tokens in, one token or none out."""
    generated = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=20,
        seed=4,
        logprobs=2,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    ).choices[0]
    fields = generated.model_extra or {}
    assert generated.logprobs is not None
    tokens = [*fields["prompt_token_ids"], *fields["token_ids"]]
    for max_tokens in (0, 1):
        echoed = client.completions.create(
            model="tiny",
            prompt=tokens,
            max_tokens=max_tokens,
            temperature=0.0,
            logprobs=2,
            echo=True,
            extra_body={"ignore_eos": True},
        ).choices[0]
        assert echoed.logprobs is not None
        logprobs = echoed.logprobs.token_logprobs
        assert logprobs is not None
        assert len(logprobs) == len(tokens) + max_tokens
        assert logprobs[0] is None
        assert logprobs[len(tokens) - 20 : len(tokens)] == generated.logprobs.token_logprobs
        assert echoed.finish_reason == "length"


def test_an_answer_has_the_id_of_its_request_once(service: Running) -> None:
    """Ray's proxy names requests without an id, and repeats the id in the answer."""
    url, body = f"{service.url}/v1/completions", {"prompt": "Tom", "max_tokens": 2}
    answer = httpx.post(url, json=body, headers={"X-Request-Id": "gateway-17"})
    assert answer.json()["id"] == "cmpl-gateway-17"
    assert answer.headers.get_list("x-request-id") == ["gateway-17"]
    drawn = httpx.post(url, json=body)
    (request_id,) = drawn.headers.get_list("x-request-id")
    assert drawn.json()["id"] == f"cmpl-{request_id}"


def test_a_wrong_parameter_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=100_000)
    assert refusal.value.param == "max_tokens"


def test_a_prompt_that_does_not_fit_is_refused_as_such(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(model="tiny", prompt="cat " * 9000, max_tokens=1)
    assert refusal.value.code == "context_length_exceeded"


def test_the_service_is_healthy_because_a_token_can_be_generated(service: Running) -> None:
    answer = httpx.get(f"{service.url}/health", timeout=30)
    assert (answer.status_code, answer.content) == (200, b"")
    state = service.pipelines.stats.remote().result(timeout_s=10)
    assert time.time() - state.last_round_unix_s < 30


def test_metrics_count_what_was_drafted_and_say_by_which_pipeline(
    client: openai.OpenAI, service: Running
) -> None:
    def drafted() -> float:
        page = httpx.get(f"{service.url}/metrics", timeout=30).text
        samples = [
            line
            for line in page.splitlines()
            if line.startswith("eesd_spec_decode_num_draft_tokens_total")
        ]
        assert len(samples) == 1
        assert 'pipeline="eesd-' in samples[0]
        return float(samples[0].rpartition(" ")[2])

    time.sleep(1.1)  # a page may be a second old
    before = drafted()
    answer = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=32,
        extra_body={"ignore_eos": True, "speculation": {"controller": "fixed"}},
    )
    report = (answer.model_extra or {})["metrics"]["speculative_decoding"]
    assert report["num_draft_tokens"] > 0
    # Two ingresses answer, each with a page that may be a second old.
    until(lambda: drafted() - before == report["num_draft_tokens"])


def test_no_recorder_no_metric(service: Running) -> None:
    assert "eesd_recorder" not in httpx.get(f"{service.url}/metrics", timeout=30).text


def test_every_ingress_shows_the_metrics_of_all(service: Running) -> None:
    def counted() -> dict[str, float]:
        page = httpx.get(f"{service.url}/metrics", timeout=30).text
        families = text_string_to_metric_families(page)
        samples = [s for f in families for s in f.samples if s.name == "eesd_http_requests_total"]
        samples_of_path = [s for s in samples if s.labels["path"] == "/v1/models"]
        return {s.labels["ingress"]: s.value for s in samples_of_path}

    time.sleep(1.1)  # a page may be a second old
    before = sum(counted().values())
    for _ in range(20):
        assert httpx.get(f"{service.url}/v1/models", timeout=30).status_code == 200

    def has_all() -> bool:
        counts = counted().values()
        return len(counts) == 2 and sum(counts) == before + 20

    until(has_all)


def test_rounds_say_where_their_time_went(client: openai.OpenAI, service: Running) -> None:
    client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8)
    rounds = httpx.get(f"{service.url}/debug/rounds", timeout=30).json()["rounds"]
    assert rounds[-1]["num_emitted"] >= 1
    assert rounds[-1]["verify_s"] > 0.0


def test_a_client_that_leaves_frees_what_its_request_held(service: Running) -> None:
    body = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 3000,
        "stream": True,
        "ignore_eos": True,
    }
    with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        first = next(line for line in lines if line.startswith("data: "))
        assert json.loads(first.removeprefix("data: "))["choices"]
        assert service.pipelines.stats.remote().result(timeout_s=10).num_running >= 1
    until(lambda: service.pipelines.stats.remote().result(timeout_s=10).num_running == 0)
    assert service.state().num_live == 0


def test_the_router_has_learnt_from_the_rounds(client: openai.OpenAI, service: Running) -> None:
    client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=40, extra_body={"ignore_eos": True}
    )
    router = ray.get_actor(service.config.router.name, namespace=service.config.router.namespace)
    beliefs = until(lambda: _learnt(router))
    assert beliefs["workloads"]["completion/t1"]["num_rounds"] > 0
    assert len(beliefs["pipelines"]) == 1


def test_one_trace_leads_from_the_client_to_every_verify_rank(
    client: openai.OpenAI, service: Running
) -> None:
    trace_id, client_span = f"{random.getrandbits(128):032x}", f"{random.getrandbits(64):016x}"
    client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=6,
        extra_headers={"traceparent": f"00-{trace_id}-{client_span}-01"},
    )

    def trace() -> list[WrittenSpan] | None:
        folder = service.config.telemetry.trace_folder
        assert folder is not None
        spans = [s for s in read_spans(folder) if s.trace_id == trace_id]
        ranks = {s.attributes[names.RANK] for s in spans if s.name == names.SPAN_VERIFY_RANK}
        # Every process writes in its own time: a span may be here before its parent.
        span_ids = {client_span, *(s.span_id for s in spans)}
        has_all = ranks == {0, 1} and len({s.process for s in spans}) == 4
        return spans if has_all and all(s.parent_id in span_ids for s in spans) else None

    spans = until(trace)
    by_id = {span.span_id: span for span in spans}

    def parents(name: str) -> set[str]:
        return {
            by_id[s.parent_id].name if s.parent_id in by_id else f"client {s.parent_id}"
            for s in spans
            if s.name == name
        }

    request = {"text_completion tiny"}
    assert parents("POST /v1/completions") == {f"client {client_span}"}
    assert parents("text_completion tiny") == {"POST /v1/completions"}
    assert parents(names.SPAN_ROUTE) == request
    assert parents(names.SPAN_ROUND) == request
    stages = (names.SPAN_PLAN, names.SPAN_DRAFT, names.SPAN_VERIFY, names.SPAN_COMMIT)
    for stage in (*stages, names.SPAN_VERIFY_RANK):
        assert parents(stage) == {names.SPAN_ROUND}
    assert len({span.process for span in spans}) == 4  # ingress, drafting actor, two ranks


def test_a_request_keeps_its_text_when_it_is_resumed_from_its_tokens(service: Running) -> None:
    tokenizer = Tokenizer.load(service.config.engine.model.path)
    whole = Request(
        request_id=RequestId("whole"),
        prompt=tokenizer.encode(PROMPT),
        sampling=SamplingParams(max_tokens=40, seed=21),
    )
    tokens = tokens_of(service.items(whole))
    resumed = replace(whole, request_id=RequestId("resumed"), generated=tuple(tokens[:15]))
    assert tokens_of(service.items(resumed)) == tokens[15:]


def test_a_batch_over_the_service_is_the_batch_in_one_process(
    service: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "in.jsonl"
    bodies = [{"prompt": f"row {i}", "max_tokens": 8, "temperature": 0.8} for i in range(3)]
    lines = [
        json.dumps({"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": b})
        for i, b in enumerate(bodies)
    ]
    rows.write_text("\n".join(lines) + "\n")
    model = ("--model", str(service.config.engine.model.path), "--dtype", "float32")

    def texts(name: str, *words: str) -> dict[str, str]:
        out = tmp_path / name
        assert main(["batch", str(rows), str(out), "--quiet", *words]) == 0
        assert "3 answered, 0 failed" in capsys.readouterr().out
        answers = [json.loads(line) for line in out.read_text().splitlines()]
        return {
            answer["custom_id"]: answer["response"]["body"]["choices"][0]["text"]
            for answer in answers
        }

    served = texts("there.jsonl", "--url", service.url)
    assert len(set(served.values())) == 3
    assert served == texts("here.jsonl", *model, "--device", "cpu", "--in-process")


def _learnt(router: Any) -> Any:
    beliefs = ray.get(router.describe.remote(), timeout=10)
    workload = beliefs["workloads"].get("completion/t1")
    return beliefs if workload and workload["num_rounds"] else None


def test_bench_batch_compares_the_service_with_its_engine(
    service: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    model = service.config.engine.model
    where = ("--model", str(model.path), "--dtype", "float32", "--url", service.url)
    size = ("--batches", "3", "--repeats", "2", "--max-tokens", "16", "--skip-transformers")
    assert main(["bench", "batch", *where, *size, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["batches"]["3"]
    assert list(rows) == ["plain", "speculation", "ngram", "service plain", "service speculation"]
    assert {name: row["texts_unlike_plain"] for name, row in rows.items()} == dict.fromkeys(rows, 0)
    for name, row in rows.items():
        assert ("over_engine" in row) == name.startswith("service")


def test_bench_online_reports_every_load_with_speculation_off_and_on(
    service: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"the dog {i}"}) + "\n" for i in range(6)))
    where = ("--url", service.url, "--prompts", str(prompts), "--json")
    size = ("--loads", "1", "2", "--per-load", "4", "--max-tokens", "8")
    assert main(["bench", "online", *where, *size]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(row["load"], row["speculation"], row["requests"]) for row in report["rows"]] == [
        *((1, "off", 4), (1, "auto", 4), (2, "off", 4), (2, "auto", 4)),
    ]
    assert all(0 < row["tokens"] <= 32 for row in report["rows"])
    assert all(row["acceptance"] is None for row in report["rows"] if row["speculation"] == "off")
    assert set(report["summary"]["tokens_per_s_on_over_off"]) == {"1", "2"}
    assert report["alone"]["off"]["verify"] > 0.0
    prompts.write_text(json.dumps({"prompt": "the dog", "max_tokens": 8}) + "\n")
    assert main(["bench", "online", *where, "--max-tokens", "1000000"]) == 1
    assert "ask for at most" in capsys.readouterr().err
