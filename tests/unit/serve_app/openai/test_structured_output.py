"""What an answer has to look like: the fields of OpenAI and of vLLM, and what is refused."""

import json
import threading
import time
from typing import Any

import pytest

from eesd_dist.text import Tokenizer
from eesd_dist.text.grammars import GrammarCompiler, masks_along
from tests.unit.serve_app.openai.conftest import MODEL, Api

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
LARK = 'start: "a" | "b" /[0-9]+/'
OBJECT = (['{"a":1}', '{"a": 12}', '{\n  "a": 1\n}'], ["[1]", '{"b":1}', '{"a":\n\n1}'])


def accepts(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Returns whether this is a whole text of the grammar."""
    matcher = GrammarCompiler(lambda: tokenizer).matcher(grammar)
    tokens = [*tokenizer.encode(text), tokenizer.eos_token_ids[0]]
    return len(masks_along(matcher, tokens)) == len(tokens) + 1


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"response_format": {"type": "json_object"}}, ['{"x": [1, null]}', "{}"], ["[1]", "1"]),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            *OBJECT,
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": False, "schema": SCHEMA},
                }
            },
            *OBJECT,
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, ["{}"], ["1"]),
        ({"structured_outputs": {"json": SCHEMA}}, *OBJECT),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, *OBJECT),
        ({"structured_outputs": {"json_object": True}}, ['{"x": 1}'], ["true"]),
        ({"structured_outputs": {"regex": "(ab)+"}}, ["ab", "abab"], ["aba", "", "xab"]),
        ({"structured_outputs": {"choice": ["ja", 'ne"in\n']}}, ["ja", 'ne"in\n'], ["nein", "j"]),
        ({"structured_outputs": {"grammar": LARK}}, ["a", "b77"], ["b", "c"]),
        ({"structured_outputs": {"grammar": 'root ::= "x" root?'}}, ["x", "xxx"], ["", "y"]),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            ['{"a":1}'],
            ['{"a": 1}'],
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "_"}},
            ['{"a":1}', '{_"a":_1}'],
            ['{"a": 1}'],
        ),
        ({"guided_json": SCHEMA}, *OBJECT),
        ({"guided_json": json.dumps(SCHEMA), "guided_decoding_backend": "xgrammar"}, *OBJECT),
        ({"guided_regex": "[0-9]{3}"}, ["007"], ["07"]),
        ({"guided_choice": ["a", "b"]}, ["b"], ["ab"]),
        ({"guided_grammar": LARK}, ["a"], ["aa"]),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": "~"}, ['{~"a":1}'], ['{ "a":1}']),
    ],
)
@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_a_field_becomes_the_grammar_that_it_means(
    kind: str, fields: dict[str, Any], right: list[str], wrong: list[str], api: Api
) -> None:
    path = "/v1/completions" if kind == "completion" else "/v1/chat/completions"
    body = {"prompt": "x"} if kind == "completion" else {"messages": [{"role": "user"}]}
    assert api.post(path, {"max_tokens": 3, "seed": 1} | body | fields).status_code == 200
    (request,) = api.engine.requests
    grammar = request.sampling.grammar
    assert grammar is not None
    for text in right:
        assert accepts(api.tokenizer, grammar, text), text
    for text in wrong:
        assert not accepts(api.tokenizer, grammar, text), text


def test_every_choice_has_the_grammar_and_text_has_none(api: Api) -> None:
    api.post("/v1/completions", {"prompt": ["x", "y"], "n": 2, "guided_choice": ["a"]})
    assert len({request.sampling.grammar for request in api.engine.requests}) == 1
    api.engine.requests.clear()
    for fields in ({}, {"response_format": {"type": "text"}}, {"guided_json": None}):
        api.post("/v1/completions", {"prompt": "x"} | fields)
    assert [request.sampling.grammar for request in api.engine.requests] == [None] * 3


def test_the_official_client_sends_a_schema(api: Api) -> None:
    api.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA},
        },
    )
    (request,) = api.engine.requests
    assert request.sampling.grammar is not None


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"guided_json": {"not": {}, "properties": {"x": {"uniqueItems": True}}}},
            "guided_json",
            "not supported: not",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "array", "contains": {}}},
                }
            },
            "response_format.json_schema.schema",
            "not supported: contains",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"guided_json": "{"}, "guided_json", "found no JSON"),
        ({"guided_json": "[1]"}, "guided_json", "found a JSON list"),
        ({"guided_json": {"$ref": "#/nowhere"}}, "guided_json", "nowhere"),
        ({"guided_json": {"$ref": "https://example.com/x"}}, "guided_json", "example.com"),
        ({"guided_json": {"type": "strnig"}}, "guided_json", "strnig"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_regex": r"(a)\1"}, "guided_regex", "backreference"),
        ({"guided_regex": "(a{1000}){1000}"}, "guided_regex", "cannot be used"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"guided_choice": [""]}, "guided_choice", "at least 1"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice", "at most 1024"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
        ({"guided_grammar": "x ::= ("}, "guided_grammar", "cannot be"),
        ({"guided_choice": ["x" * 300_000]}, "guided_choice", "expected at most"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs", "json"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "expected one of them"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.choice",
            "expected one of them",
        ),
        ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos", "leave out ignore_eos"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    fields: dict[str, Any], param: str, message: str, api: Api
) -> None:
    answer = api.post("/v1/completions", {"prompt": "x", "max_tokens": 8} | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].startswith(param)
    assert message in error["message"]
    assert api.engine.requests == []


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(10_000))},
        {
            "guided_json": json.dumps(
                {
                    "$ref": "#/$defs/0",
                    "$defs": {
                        **{str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(5_000)},
                        "5000": {"type": "null"},
                    },
                }
            )
        },
        {"guided_json": {"type": "integer", "multipleOf": 1_000_003}},
        {"guided_json": "[" * 200_000},
        {"guided_json": '{"items": ' * 300 + "{}" + "}" * 300},
        {"guided_json": '{"maximum": 1e400}'},
        {"guided_json": {"const": "\ud800"}},
    ],
)
def test_grammars_that_would_end_or_stop_a_process_are_refused(
    fields: dict[str, Any], api: Api
) -> None:
    started = time.monotonic()
    body = json.dumps({"prompt": "x", "max_tokens": 2} | fields)
    answer = api.http.post(
        "/v1/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400, answer.text
    assert time.monotonic() - started < 5.0
    good = api.post("/v1/completions", {"prompt": "x", "guided_regex": "[a-f]+"})
    assert good.status_code == 200


def test_hostile_grammars_keep_no_client_waiting(api: Api) -> None:
    """Each takes a tenth of a second or two of a thread."""
    statuses: list[int] = []

    def attack(number: int) -> None:
        pattern = f"(a{{{1000 + number}}}){{1000}}"
        statuses.append(
            api.post("/v1/completions", {"prompt": "x", "guided_regex": pattern}).status_code
        )

    threads = [threading.Thread(target=attack, args=(number,)) for number in range(12)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    slowest_s = 0.0
    while any(thread.is_alive() for thread in threads):
        started = time.monotonic()
        assert api.get("/ping").status_code == 200
        slowest_s = max(slowest_s, time.monotonic() - started)
    for thread in threads:
        thread.join()
    assert statuses == [400] * 12
    # A loop that compiled them would answer after all of them; a busy machine slows down both.
    assert slowest_s < max(1.0, (time.monotonic() - began) / 2)
    assert api.post("/v1/completions", {"prompt": "x", "guided_regex": "a+"}).status_code == 200


def test_what_a_schema_asks_and_nothing_checks_is_a_warning(api: Api) -> None:
    schema = {"type": "string", "format": "color"}
    body = {"prompt": "x", "guided_json": schema, "max_tokens": 2}
    (warning,) = api.post("/v1/completions", body).json()["warnings"]
    assert warning == "guided_json: the format 'color' is not known"
