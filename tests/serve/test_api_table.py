"""Every row of docs/api.md against the running service, by curl and by the `openai` client: each
parameter works, is refused, or is ignored, as its table says."""

import json
import re
import secrets
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import openai
import pytest
import ray
from ray import serve

from eesd_dist.text import Tokenizer
from serve_app.app import build_app
from serve_app.config import service_config
from serve_app.service.serve_instance import deploy
from tests.support.running import Running, until
from tests.support.tiny_service import write_tiny_service
from tests.support.tool_models import TEMPLATES

NAME = "api"
API = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
Json = dict[str, Any]


def _rows(table: str) -> list[str]:
    """Returns the first column of a table of docs/api.md."""
    text = API.partition(f"<!-- {table} -->")[2].partition(f"<!-- end of {table} -->")[0]
    return re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)


@pytest.fixture(scope="module")
def own(ray_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service of a model that knows tools."""
    folder = write_tiny_service(tmp_path_factory.mktemp("model") / "tiny")
    (folder / "chat_template.jinja").write_text(TEMPLATES["hermes"])
    config = service_config(
        {
            "engine": {
                "model": {"path": str(folder), "dtype": "float32", "device": "cpu"},
                "cache": {"num_pages": 256},
            },
            "app_name": NAME,
            "num_ingresses": 1,
            "model_name": "tiny",
            "router": {"name": f"{NAME}-router"},
            "recovery": {"stream_pause_s": 120.0},
        }
    )
    deploy(build_app(config), name=NAME, route_prefix=f"/{NAME}", wait=Event().wait)
    yield Running(
        url=f"http://127.0.0.1:{ray_port}/{NAME}",
        config=config,
        pipelines=serve.get_deployment_handle("Pipeline", NAME),
    )
    serve.delete(NAME)
    ray.kill(ray.get_actor(f"{NAME}-router", namespace=config.router.namespace))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one request was answered."""

    status: int
    body: Json = field(default_factory=dict)
    events: list[Json] = field(default_factory=list)

    @property
    def choice(self) -> Json:
        choice: Json = self.body["choices"][0]
        return choice

    @property
    def text(self) -> str:
        if self.events:
            deltas = [event["choices"][0] for event in self.events if event["choices"]]
            return "".join(e.get("text") or e.get("delta", {}).get("content") or "" for e in deltas)
        if "output" in self.body:
            return "".join(segment["text"] for segment in self.body["output"][0]["content"])
        return self.choice.get("text") or self.choice.get("message", {}).get("content") or ""

    @property
    def ids(self) -> list[int]:
        token_ids: list[int] = self.choice["token_ids"]
        return token_ids


class Asker:
    """Sends bodies to one endpoint by one client."""

    def __init__(self, service: Running, *, path: str, client: str, basis: Json) -> None:
        self.service, self.path, self.client, self.basis = service, path, client, basis
        self.tokenizer = _tokenizer(service.config.engine.model.path)

    def __call__(self, **fields: object) -> Answer:
        body = {**self.basis, **fields}
        status, text = (self._curl if self.client == "curl" else self._openai)(body)
        if status == 200 and body.get("stream"):
            lines = [line for line in text.split("\n") if line.startswith("data: {")]
            return Answer(status=status, events=[json.loads(line[6:]) for line in lines])
        return Answer(status=status, body=json.loads(text))

    def _curl(self, body: Json) -> tuple[int, str]:
        done = subprocess.run(
            [
                "curl",
                "--silent",
                "--show-error",
                "--max-time",
                "60",
                "--write-out",
                "\n%{http_code}",
                "--header",
                "Content-Type: application/json",
                "--data-binary",
                "@-",
                self.service.url + self.path,
            ],
            input=json.dumps(body).encode(),
            capture_output=True,
            check=True,
        )
        text, _, status = done.stdout.decode().rpartition("\n")
        return int(status), text

    def _openai(self, body: Json) -> tuple[int, str]:
        with openai.OpenAI(
            base_url=self.service.url, api_key="none", max_retries=0, timeout=60
        ) as client:
            try:
                answer = client.post(self.path, body=body, cast_to=httpx.Response)
            except openai.APIStatusError as error:
                return error.status_code, error.response.text
        return answer.status_code, answer.text


@cache
def _tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


COMPLETION: Json = {
    "model": "tiny",
    "prompt": "the quick brown fox",
    "max_tokens": 12,
    "seed": 1,
    "temperature": 0.8,
    "ignore_eos": True,
    "return_token_ids": True,
}
CHAT: Json = {
    **{name: value for name, value in COMPLETION.items() if name != "prompt"},
    "messages": [{"role": "user", "content": "the quick brown fox"}],
}
RESPONSE: Json = {
    "model": "tiny",
    "input": "the quick brown fox",
    "max_output_tokens": 12,
    "seed": 1,
    "temperature": 0.8,
}
A, B = 290, 291
"""Tokens that cases force."""
FORCED = {"logit_bias": {str(A): 100}, "temperature": 0}
EITHER = {"logit_bias": {str(A): 50, str(B): 50}, "temperature": 0}
ENDS = {"ignore_eos": False}
"""A text with a grammar ends with the model's end token."""
INTEGER = {"type": "integer", "minimum": 10, "maximum": 99}
TWICE = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}

Check = Callable[[Asker], None]


def _is(condition: Callable[[Answer, Asker], object], **fields: object) -> Check:
    """Returns a check of one answer."""

    def check(ask: Asker) -> None:
        answer = ask(**fields)
        assert answer.status == 200, answer.body
        assert condition(answer, ask), answer

    return check


def _same(**fields: object) -> Check:
    """Returns a check that a field changes nothing about the text."""
    return _is(lambda answer, ask: answer.text == ask().text, **fields)


def _refuses(status: int, **fields: object) -> Check:
    def check(ask: Asker) -> None:
        answer = ask(**fields)
        assert answer.status == status, answer.body

    return check


def _all(*checks: Check) -> Check:
    def check(ask: Asker) -> None:
        for single_check in checks:
            single_check(ask)

    return check


def _penalty(name: str, *, penalty: float, reward: float) -> Check:
    """Returns a check that of two forced tokens both come, or the first one again and again."""
    return _all(
        _is(lambda answer, _: set(answer.ids) == {A, B}, **EITHER, **{name: penalty}),
        _is(lambda answer, _: len(set(answer.ids)) == 1, **EITHER, **{name: reward}),
    )


def _greedy(**fields: object) -> Check:
    """Returns a check that a filter leaves only the likeliest token."""
    return _all(
        _is(lambda answer, ask: answer.text == ask(temperature=0).text, **fields),
        _is(lambda answer, ask: answer.text != ask(temperature=0).text),
    )


def _word(ask: Asker, token: int = A) -> str:
    return ask.tokenizer.decode([token])  # type: ignore[list-item]


def _stops(ask: Asker) -> None:
    word = _word(ask)
    answer = ask(**FORCED, stop=[word])
    assert (answer.text, answer.choice["finish_reason"]) == ("", "stop")
    assert answer.choice["stop_reason"] == word
    assert ask(**FORCED, stop=word, include_stop_str_in_output=True).text == word


def _bans(ask: Asker) -> None:
    answer = ask(**EITHER, bad_words=[_word(ask)])
    assert answer.status == 200, answer.body
    assert set(answer.ids) == {B}


def _ends(ask: Asker) -> None:
    """The end token is forced; fields of `ignore_eos` and `min_tokens`."""
    end = ask.tokenizer.eos_token_ids[0]
    forced = {"logit_bias": {str(end): 100}, "temperature": 0}
    assert ask(**forced, ignore_eos=False).choice["finish_reason"] == "stop"
    assert ask(**forced).choice["finish_reason"] == "length"
    waiting = ask(**forced, ignore_eos=False, min_tokens=5)
    assert len(waiting.ids) == 6
    assert end not in waiting.ids[:5]
    text = ask(**forced, skip_special_tokens=False).text
    assert "<|end|>" in text
    assert ask(**forced).text == ""


def _streams(ask: Asker) -> None:
    assert ask(stream=True).text == ask().text
    events = ask(stream=True, stream_options={"include_usage": True}).events
    assert events[-1]["usage"]["completion_tokens"] == 12
    assert "usage" not in ask(stream=True).events[-1] or not ask(stream=True).events[-1]["usage"]


def _seeds(ask: Asker) -> None:
    texts = [ask(seed=seed).text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


PROMPTS = {"prompt", "messages", "input"}
"""Names of the field with the text."""


def _salts(ask: Asker) -> None:
    """A prefix is reused only by requests with the same salt."""
    text = "the quick brown fox " * 20
    chat = [{"role": "user", "content": text}]
    prompt = {name: chat if name == "messages" else text for name in PROMPTS & ask.basis.keys()}
    salt_a, salt_b = secrets.token_hex(8), secrets.token_hex(8)
    usages = [ask(**prompt, cache_salt=salt).body["usage"] for salt in (salt_a, salt_a, salt_b)]
    (details,) = (
        name for name in usages[0] if name in ("prompt_tokens_details", "input_tokens_details")
    )
    first, repeat, salted = (usage[details]["cached_tokens"] for usage in usages)
    assert first == salted == 0 < repeat


BOTH: Mapping[str, Check] = {
    "allowed_token_ids": _is(
        lambda answer, _: set(answer.ids) <= {A, B, 72}, allowed_token_ids=[A, B, 72]
    ),
    "bad_words": _bans,
    "cache_salt": _salts,
    "frequency_penalty": _penalty("frequency_penalty", penalty=2.0, reward=-2.0),
    "guided_choice": _is(lambda a, _: a.text in ("yes", "no"), guided_choice=["yes", "no"], **ENDS),
    "guided_grammar": _is(
        lambda a, _: re.fullmatch("(ab)+c", a.text),
        guided_grammar='start: "ab"~1..3 "c"',
        **ENDS,
    ),
    "guided_json": _is(lambda a, _: 10 <= json.loads(a.text) < 100, guided_json=INTEGER, **ENDS),
    "guided_regex": _is(
        lambda a, _: re.fullmatch("[0-9]{3}", a.text), guided_regex="[0-9]{3}", **ENDS
    ),
    "guided_whitespace_pattern": _is(
        lambda a, _: re.fullmatch(r"\[(  )?1(  )?,(  )?1(  )?\]", a.text),
        guided_json=TWICE,
        guided_whitespace_pattern="  ",
        **ENDS,
    ),
    "ignore_eos": _ends,
    "include_stop_str_in_output": _stops,
    "logit_bias": _is(lambda a, _: set(a.ids) == {A}, logit_bias={str(A): 100}),
    "min_p": _greedy(min_p=1.0),
    "min_tokens": _ends,
    "model": _all(_same(model=None), _refuses(404, model="other")),
    "n": _is(
        lambda a, ask: len(a.body["choices"]) == 3 and a.text == ask().text,
        n=3,
    ),
    "presence_penalty": lambda ask: _assert(
        len(set(ask(presence_penalty=-2.0, max_tokens=60).ids))
        < len(set(ask(presence_penalty=2.0, max_tokens=60).ids))
    ),
    "priority": _all(_same(priority=5), _refuses(400, priority=-1)),
    "prompt_logprobs": _is(
        lambda a, _: len(a.choice.get("prompt_logprobs") or a.body.get("prompt_logprobs")) > 3,
        prompt_logprobs=1,
    ),
    "repetition_penalty": _penalty("repetition_penalty", penalty=10.0, reward=0.1),
    "request_id": _is(lambda a, _: a.body["id"].endswith("-mine"), request_id="mine"),
    "response_format": _is(
        lambda a, _: 10 <= json.loads(a.text) < 100,
        response_format={"type": "json_schema", "json_schema": {"name": "i", "schema": INTEGER}},
        **ENDS,
    ),
    "return_token_ids": _is(
        lambda a, _: len(a.ids) == a.body["usage"]["completion_tokens"], return_token_ids=True
    ),
    "return_token_origins": _is(
        lambda a, _: (
            len(a.choice["token_origins"]) == 12
            and set(a.choice["token_origins"]) <= {"accepted", "recovered", "bonus", "target"}
        ),
        return_token_origins=True,
    ),
    "seed": _seeds,
    "skip_special_tokens": _ends,
    "speculation": _all(
        _same(speculation={"mode": "off"}),
        _is(
            lambda a, _: a.body["metrics"]["speculative_decoding"] is None,
            speculation={"mode": "off"},
        ),
    ),
    "stop": _stops,
    "stop_token_ids": _is(
        lambda a, _: a.choice["stop_reason"] == A and a.choice["finish_reason"] == "stop",
        **FORCED,
        stop_token_ids=[A],
    ),
    "stream": _streams,
    "stream_options": _streams,
    "structured_outputs": _is(
        lambda a, _: a.text in ("yes", "no"), structured_outputs={"choice": ["yes", "no"]}, **ENDS
    ),
    "temperature": _greedy(temperature=0),
    "top_k": _greedy(top_k=1),
    "top_p": _greedy(top_p=1e-6),
}


def _num_prompt(**fields: object) -> Callable[[Asker], int]:
    def number(ask: Asker) -> int:
        answer = ask(**fields)
        assert answer.status == 200, answer.body
        return int(answer.body["usage"]["prompt_tokens"])

    return number


def _prompts(ask: Asker) -> None:
    ids = list(ask.tokenizer.encode("the quick brown fox"))
    assert ask(prompt=ids).text == ask().text
    for prompts in (["the quick brown fox", "a dog"], [ids, ids[:3]]):
        answer = ask(prompt=prompts)
        assert len(answer.body["choices"]) == 2
        assert answer.text == ask().text


COMPLETIONS: Mapping[str, Check] = {
    "add_special_tokens": _is(
        lambda a, ask: (
            a.choice["prompt_token_ids"]
            == list(ask.tokenizer.encode("the quick brown fox", add_special_tokens=False))
        ),
        add_special_tokens=False,
    ),
    "echo": _is(lambda a, ask: a.text == "the quick brown fox" + ask().text, echo=True),
    "logprobs": _is(
        lambda a, _: (
            len(a.choice["logprobs"]["token_logprobs"]) == 12
            and all(len(entry) >= 2 for entry in a.choice["logprobs"]["top_logprobs"])
        ),
        logprobs=2,
    ),
    "max_tokens": _all(
        _is(lambda a, _: len(a.ids) == 3, max_tokens=3),
        _is(
            lambda a, _: a.body["usage"]["completion_tokens"] == 0,
            max_tokens=0,
            echo=True,
            logprobs=1,
        ),
        _refuses(400, max_tokens=100_000),
    ),
    "prompt": _prompts,
}


def _continues(ask: Asker) -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": "jumps"}]
    options = {"messages": messages, "add_generation_prompt": False}
    whole = _num_prompt(**options)(ask)
    cut = _num_prompt(**options, continue_final_message=True)(ask)
    assert cut < whole, "the template's end of the message is left out"


def _calls(ask: Asker) -> None:
    forced = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200, **ENDS}
    answer = ask(**forced)
    assert answer.status == 200, answer.body
    calls = answer.choice["message"]["tool_calls"]
    assert calls[0]["function"]["name"] == "now"
    assert ask(tools=[TOOL]).status == 200
    untouched = ask(tools=[TOOL], tool_choice="none")
    assert not untouched.choice["message"].get("tool_calls")
    single = ask(**forced, parallel_tool_calls=False)
    assert len(single.choice["message"]["tool_calls"]) == 1


CHATS: Mapping[str, Check] = {
    "add_generation_prompt": lambda ask: _assert(
        _num_prompt(add_generation_prompt=False)(ask) < _num_prompt()(ask)
    ),
    "chat_template_kwargs": _same(chat_template_kwargs={"no_template_reads_this": 1}),
    "continue_final_message": _continues,
    "logprobs": _is(lambda a, _: len(a.choice["logprobs"]["content"]) == 12, logprobs=True),
    "max_completion_tokens": _is(lambda a, _: len(a.ids) == 3, max_completion_tokens=3),
    "max_tokens": _is(lambda a, _: len(a.ids) == 3, max_tokens=3),
    "messages": _refuses(400, messages=[{"role": "unheard-of", "content": "x"}]),
    "parallel_tool_calls": _calls,
    "tool_choice": _calls,
    "tools": _calls,
    "top_logprobs": _all(
        _is(
            lambda a, _: all(
                len(entry["top_logprobs"]) == 2 for entry in a.choice["logprobs"]["content"]
            ),
            logprobs=True,
            top_logprobs=2,
        ),
        _refuses(400, top_logprobs=2),
    ),
}


def _assert(condition: bool) -> None:
    assert condition


def _num_input(answer: Answer) -> int:
    return int(answer.body["usage"]["input_tokens"])


RESPONSES: Mapping[str, Check] = {
    "cache_salt": _salts,
    "input": _same(input=[{"role": "user", "content": "the quick brown fox"}]),
    "instructions": _is(lambda a, ask: _num_input(a) > _num_input(ask()), instructions="be brief"),
    "max_output_tokens": _is(
        lambda a, _: a.body["usage"]["output_tokens"] <= 3 and a.body["status"] == "incomplete",
        max_output_tokens=3,
    ),
    "metadata": _is(lambda a, _: a.body["metadata"] == {"a": "b"}, metadata={"a": "b"}),
    "model": _all(_same(model=None), _refuses(404, model="other")),
    "request_id": _is(lambda a, _: a.body["id"].endswith("mine"), request_id="mine"),
    "seed": _seeds,
    "speculation": _same(speculation={"mode": "off"}),
    "stream": lambda ask: _assert(
        "".join(e["delta"] for e in ask(stream=True).events if e["type"].endswith("text.delta"))
        == ask().text
    ),
    "temperature": _is(lambda a, ask: a.text == ask(top_p=1e-6).text, temperature=0),
    "text": _is(
        lambda a, _: 10 <= json.loads(a.text) < 100,
        text={"format": {"type": "json_schema", "name": "i", "schema": INTEGER}},
    ),
    "top_p": _is(lambda a, ask: a.text == ask(temperature=0).text, top_p=1e-6),
}
REFUSED: Mapping[str, Json] = {
    "echo": {"echo": True},
    "best_of": {"best_of": 3},
    "detokenize": {"detokenize": False},
    "length_penalty": {"length_penalty": 2.0},
    "spaces_between_special_tokens": {"spaces_between_special_tokens": False},
    "tool_choice": {"tool_choice": "required"},
    "tools": {"tools": [TOOL]},
    "typical_p": {"typical_p": 0.5},
}
"""Values that are refused, where a text is not one."""
TABLES: Mapping[str, tuple[Mapping[str, Check], Mapping[str, Json]]] = {
    "fields of both": (BOTH, {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}),
    "fields of completions": (COMPLETIONS, {"/v1/completions": COMPLETION}),
    "fields of chats": (CHATS, {"/v1/chat/completions": CHAT}),
    "fields of responses": (RESPONSES, {"/v1/responses": RESPONSE}),
}


@pytest.mark.parametrize("client", ["curl", "openai"])
@pytest.mark.parametrize(
    ("table", "name"), [(table, name) for table in TABLES for name in _rows(table)]
)
def test_each_parameter_works(own: Running, table: str, name: str, client: str) -> None:
    checks, endpoints = TABLES[table]
    for path, basis in endpoints.items():
        checks[name](Asker(own, path=path, client=client, basis=basis))


def test_no_case_is_without_a_row() -> None:
    for table, (checks, _) in TABLES.items():
        assert sorted(checks) == sorted(_rows(table))


@pytest.mark.parametrize("client", ["curl", "openai"])
def test_each_refused_field_is_refused_by_name(own: Running, client: str) -> None:
    ask = Asker(own, path="/v1/completions", client=client, basis=COMPLETION)
    chat = Asker(own, path="/v1/chat/completions", client=client, basis=CHAT)
    names = _rows("refused fields")
    assert len(names) > 20
    for name in names:
        answer = (chat if name == "echo" else ask)(**REFUSED.get(name, {name: "x"}))
        assert answer.status == 400, name
        assert answer.body["error"]["param"] == name


@pytest.mark.parametrize("client", ["curl", "openai"])
def test_each_ignored_field_changes_nothing(own: Running, client: str) -> None:
    text = API.partition("<!-- ignored fields -->")[2].partition("<!--")[0]
    names = re.findall(r"`(\w+)`", text)
    assert len(names) > 8
    for path, basis in {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}.items():
        ask = Asker(own, path=path, client=client, basis=basis)
        answer = ask(**dict.fromkeys(names, "x"))
        assert answer.status == 200, answer.body
        assert answer.text == ask().text
        assert not answer.body.get("warnings")
    unknown = ask(no_such_field=1)
    assert any("no_such_field" in warning for warning in unknown.body["warnings"])


@pytest.mark.parametrize("client", ["curl", "openai"])
def test_tokens_of_a_text_and_back(own: Running, client: str) -> None:
    tokenize = Asker(own, path="/tokenize", client=client, basis={})
    detokenize = Asker(own, path="/detokenize", client=client, basis={})
    cases: Mapping[str, Json] = {
        "add_generation_prompt": {"messages": CHAT["messages"], "add_generation_prompt": False},
        "add_special_tokens": {"prompt": "a fox", "add_special_tokens": False},
        "messages": {"messages": CHAT["messages"]},
        "model": {"prompt": "a fox", "model": "tiny"},
        "prompt": {"prompt": "a fox"},
    }
    assert sorted(cases) == _rows("fields of tokenize")
    counts = {name: tokenize(**body).body["count"] for name, body in cases.items()}
    assert counts["add_generation_prompt"] < counts["messages"]
    assert counts["add_special_tokens"] <= counts["prompt"] == counts["model"]
    tokens = tokenize(prompt="a fox", add_special_tokens=False).body["tokens"]
    assert _rows("fields of detokenize") == ["model", "tokens"]
    assert detokenize(tokens=tokens).body["prompt"] == "a fox"
    assert detokenize(tokens=tokens, model="other").status == 404


def test_each_endpoint_and_header_of_the_page_is_there(own: Running) -> None:
    listed = re.findall(r"`(GET|POST) (/[\w/]*)`", API.partition("## Fields")[0])
    assert len(listed) > 10
    with httpx.Client(base_url=own.url, timeout=60) as client:
        for method, path in listed:
            path = path.replace("NAME", "tiny")
            answer = client.request(method, path, json={} if method == "POST" else None)
            assert answer.status_code == (200 if method == "GET" else 400), path
            if method == "GET":
                assert client.head(path).status_code == 200, path
        answer = client.post(
            "/v1/completions",
            json=COMPLETION,
            headers={"X-Request-Id": "by-header", "X-Eesd-Workload": "mine"},
        )
        assert answer.json()["id"] == "cmpl-by-header"
        assert answer.headers["x-request-id"] == "by-header"
        until(lambda: "mine" in client.get("/debug/controllers").json()["workloads"])
