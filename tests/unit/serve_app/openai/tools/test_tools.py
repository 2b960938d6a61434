"""Tools of a chat: what the template gets, what the answer must be, and what the client is sent."""

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from eesd_dist.text.grammars import GrammarCompiler
from serve_app.openai.tools import ToolCallParser, calls_grammar, format_of
from tests.support.event_stream import WITH_IDS, parsed
from tests.support.live_server import serving
from tests.support.tool_models import FORMATS, TEMPLATES, tool_tokenizer
from tests.support.toy_api import toy_api
from tests.support.toy_engine import ToyEngine
from tests.unit.serve_app.openai.conftest import LIMITS, Api

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "description": "the time"}},
]
USER = {"role": "user", "content": "hi"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": WEATHER,
    "now": {
        "type": "object",
        "properties": {"zone": {"$ref": "#/$defs/zone"}, "inner": {"$ref": "#"}},
        "additionalProperties": False,
        "$defs": {"zone": {"enum": ["x", 1]}},
    },
}
FORCED = {"tool_choice": "required"}
DEEP = {"function": {"name": "f", "arguments": '{"a":' + "[" * 400 + "]" * 400 + "}"}}
BROKEN = {"function": {"name": "f", "arguments": "{city: 1}"}}


def tool_of(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def called(call: object) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [call]}


def said(name: str, *calls: tuple[str, str]) -> str:
    """Returns how a model of this format writes calls."""
    form = FORMATS[name]
    bodies = [f'{{"name": "{tool}", "{form.arguments}": {text}}}' for tool, text in calls]
    if name == "mistral":
        return f"[TOOL_CALLS][{', '.join(bodies)}]"
    if name == "llama3_json":
        return "; ".join(bodies)
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


@pytest.fixture(params=sorted(FORMATS), scope="module")
def tools_api(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Api]]:
    name = str(request.param)
    tokenizer = tool_tokenizer(tmp_path_factory.mktemp(name), name)
    engine = ToyEngine(vocab_size=tokenizer.vocab_size)
    app = toy_api(
        engine, tokenizer=tokenizer, max_model_len=4096, resume_window_s=60.0, limits=LIMITS
    )
    api = Api(engine=engine, tokenizer=tokenizer)
    with serving(app) as url:
        api.url = url
        with api.http, api.client:
            yield name, api


def test_formats_are_known_by_what_their_templates_write() -> None:
    assert {name: format_of(text) for name, text in TEMPLATES.items()} == dict(FORMATS)
    assert format_of(None) is None
    assert format_of("{{ messages }} <tool_call>") is None, "it writes no tools"
    assert format_of("{{ tools }} [TOOL_CALLS] {{ name }}[ARGS]") is None


def taken(name: str, calls: list[Any]) -> list[Any]:
    """Returns those that the templates of the format can take back."""
    return calls if FORMATS[name].allows_parallel_calls else calls[:1]


def test_calls_are_in_the_answer(tools_api: tuple[str, Api]) -> None:
    name, api = tools_api
    api.says(said(name, ("weather", '{"city": "Rome"}'), ("now", "{}")))
    body = {"messages": [USER], "tools": TOOLS}
    (choice,) = api.post(CHAT, body).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    calls = choice["message"]["tool_calls"]
    assert {call["type"] for call in calls} == {"function"}
    assert [call["function"] for call in calls] == taken(
        name,
        [
            {"name": "weather", "arguments": '{"city": "Rome"}'},
            {"name": "now", "arguments": "{}"},
        ],
    )
    (single,) = api.post(CHAT, body | {"parallel_tool_calls": False}).json()["choices"]
    assert [call["function"]["name"] for call in single["message"]["tool_calls"]] == ["weather"]


def test_a_text_is_a_text(tools_api: tuple[str, Api]) -> None:
    _, api = tools_api
    api.says("the cat < the dog")
    (choice,) = api.post(CHAT, {"messages": [USER], "tools": TOOLS}).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == "the cat < the dog"
    assert "tool_calls" not in choice["message"]


def test_a_stream_has_the_calls_piece_by_piece(tools_api: tuple[str, Api]) -> None:
    name, api = tools_api
    api.says(said(name, ("weather", '{"city": "Rome", "days": 12}'), ("now", '{"zone": "x"}')))
    stream = api.client.chat.completions.create(
        model="toy",
        messages=[{"role": "user", "content": "hi"}],
        tools=TOOLS,  # type: ignore[arg-type]
        stream=True,
    )
    calls: list[dict[str, Any]] = []
    num_deltas, finish = 0, None
    for chunk in stream:
        (choice,) = chunk.choices
        assert not choice.delta.content
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or []:
            num_deltas += 1
            assert call.function is not None
            if call.id is not None:
                calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
            calls[call.index]["arguments"] += call.function.arguments or ""
    assert finish == "tool_calls"
    assert [(call["name"], call["arguments"]) for call in calls] == taken(
        name, [("weather", '{"city": "Rome", "days": 12}'), ("now", '{"zone": "x"}')]
    )
    assert num_deltas > 3, "arguments come as they are generated"
    assert len({call["id"] for call in calls}) == len(calls)


def test_a_resumed_stream_goes_on_in_the_middle_of_a_call(tools_api: tuple[str, Api]) -> None:
    name, api = tools_api
    api.says(said(name, ("weather", '{"city": "Rome", "days": 12}'), ("now", '{"zone": "x"}')))
    body = {"messages": [USER], "tools": TOOLS, "stream": True}
    whole = parsed(api.http.post(CHAT, json=body, headers=WITH_IDS).text)
    with_ids = [at for at, event in enumerate(whole) if event.id]
    assert len(with_ids) > 4
    for at in with_ids:
        answer = api.http.post(CHAT, json=body, headers={"Last-Event-ID": whole[at].id})
        suffix = [event.data for event in parsed(answer.text)]
        assert suffix == [event.data for event in whole[at + 1 :]]


def test_the_template_gets_tools_and_earlier_calls(tools_api: tuple[str, Api]) -> None:
    _, api = tools_api
    api.says("ok")
    call = {"id": "123456789", "type": "function"}
    call |= {"function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "123456789", "content": "cold"},
    ]
    api.engine.requests.clear()
    assert api.post(CHAT, {"messages": messages, "tools": TOOLS}).status_code == 200
    prompt = api.tokenizer.decode(api.engine.requests[0].prompt, skip_special_tokens=False)
    assert '"name": "weather"' in prompt
    assert '{"city": "Oslo"}' in prompt, "as an object, not as a text"
    assert "the time" in prompt
    assert "cold" in prompt
    empty = {"role": "assistant", "content": "warm", "tool_calls": []}
    api.engine.requests.clear()
    assert api.post(CHAT, {"messages": [USER, empty, USER]}).status_code == 200
    assert "warm" in api.tokenizer.decode(api.engine.requests[0].prompt)
    for choice in ({"tool_choice": "none", "tools": TOOLS}, {}):
        api.engine.requests.clear()
        assert api.post(CHAT, {"messages": [USER], **choice}).status_code == 200
        plain = api.tokenizer.decode(api.engine.requests[0].prompt)
        assert "the time" not in plain
        assert api.engine.requests[0].sampling.grammar is None


@pytest.mark.parametrize(
    ("function", "written"),
    [
        ({}, "{}"),
        ({"arguments": None}, "{}"),
        ({"arguments": " "}, "{}"),
        ({"arguments": "null"}, "{}"),
        ({"arguments": {"city": "Oslo"}}, '{"city": "Oslo"}'),
        ({"arguments": '{"city": "Os'}, '{"city": "Os"}'),
        ({"arguments": '{"city": "Oslo", "da'}, '{"city": "Oslo"}'),
        ({"arguments": '{"days": [1, 2'}, '{"days": [1, 2]}'),
        ({"arguments": "5"}, '{"value": 5}'),
        ({"arguments": [1, "x"]}, '{"value": [1, "x"]}'),
        ({"arguments": False}, '{"value": false}'),
    ],
)
def test_arguments_of_an_earlier_call_become_an_object(
    tools_api: tuple[str, Api], function: dict[str, Any], written: str
) -> None:
    _, api = tools_api
    api.says("ok")
    call = {"id": "123456789", "type": "function", "function": {"name": "weather", **function}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "123456789", "content": "cold"},
    ]
    api.engine.requests.clear()
    answer = api.post(CHAT, {"messages": messages})
    assert answer.status_code == 200, answer.text
    prompt = api.tokenizer.decode(api.engine.requests[0].prompt, skip_special_tokens=False)
    assert written in prompt


@pytest.mark.parametrize("choice", ["required", "weather"])
def test_a_forced_call_is_a_grammar(tools_api: tuple[str, Api], choice: str) -> None:
    name, api = tools_api
    api.says(said(name, ("weather", '{"city": "Rome"}')))
    api.engine.requests.clear()
    function_choice = {"type": "function", "function": {"name": choice}}
    tool_choice = choice if choice == "required" else function_choice
    answer = api.post(CHAT, {"messages": [USER], "tools": TOOLS, "tool_choice": tool_choice})
    assert answer.status_code == 200, answer.text
    grammar = api.engine.requests[0].sampling.grammar
    assert grammar is not None
    assert ("now" in grammar) == (choice == "required")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("parallel", [True, False])
def test_whatever_a_grammar_allows_are_calls_that_match(
    name: str, parallel: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokenizer = tool_tokenizer(tmp_path_factory.mktemp("walk"), name)
    form, ends = FORMATS[name], set(tokenizer.eos_token_ids)

    def special_id(text: str) -> int | None:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return tokens[0] if len(tokens) == 1 else None

    grammar = calls_grammar(form, SCHEMAS, parallel=parallel, special_id=special_id)
    compiler, max_calls = GrammarCompiler(lambda: tokenizer), 0
    for seed in range(12):
        rng, matcher, tokens = random.Random(seed), compiler.matcher(grammar), list[int]()
        for _ in range(300):
            mask = matcher.mask_after()
            allowed = [t for t in range(tokenizer.vocab_size) if mask[t >> 3] >> (t & 7) & 1]
            closing = [t for t in allowed if tokenizer.token_bytes(t) in (b"}", b'"', b"]")]  # type: ignore[arg-type]
            likely = closing if closing and rng.random() < 0.7 else allowed
            tokens.append(rng.choice(likely))
            if tokens[-1] in ends:
                break
            matcher.read(tokens)
        assert matcher.failure is None
        text = tokenizer.decode(tokens, skip_special_tokens=False)  # type: ignore[arg-type]
        parser = ToolCallParser(form, names=list(SCHEMAS), seed="s")
        fed, ended = parser.feed(text.removesuffix("<|end|>")), parser.finish()
        if tokens[-1] in ends:
            assert fed.content + ended.content == ""
            assert 1 <= parser.num_calls <= (99 if parallel else 1)
            for call in fed.calls:
                jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name or ""])
            max_calls = max(max_calls, parser.num_calls)
    assert max_calls == 1 or (parallel and max_calls > 1)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "two tools with one name"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "none of the tools",
        ),
        (
            {"tools": TOOLS, "response_format": {"type": "json_object"}},
            "response_format",
            "expected one of them",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "pattern"),
        ({"tools": [{"type": "web_search"}]}, "tools", "function"),
        ({"tools": TOOLS[:1] * 129}, "tools", "128"),
        (
            {"tools": [tool_of({"not": {}})], **FORCED},
            "tools",
            "not supported: not",
        ),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "the field tools"),
        ({"messages": [called(BROKEN)]}, "messages[0].tool_calls", "no JSON"),
        ({"messages": [called(DEEP)]}, "messages[0].tool_calls", "levels deep"),
        ({"messages": [called(3)]}, "messages[0].tool_calls", "name"),
        ({"tools": [tool_of({"$ref": "#/Unimplemented keys: [x]"})], **FORCED}, "tools", "used"),
        ({"tools": [tool_of({"type": "Unimplemented keys: [1]"})], **FORCED}, "tools", "used"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    fields: dict[str, Any], param: str, message: str, tools_api: tuple[str, Api]
) -> None:
    _, api = tools_api
    answer = api.post(CHAT, {"messages": [USER]} | fields)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert error["param"].startswith(param)
    assert message in error["message"]


def test_a_model_without_tools_says_so(api: Api) -> None:
    with pytest.raises(openai.BadRequestError, match="chat template has no tools") as error:
        api.client.chat.completions.create(
            model="toy",
            messages=[{"role": "user", "content": "hi"}],
            tools=TOOLS,  # type: ignore[arg-type]
        )
    assert error.value.param == "tools"


def test_what_a_schema_of_a_tool_asks_and_nothing_checks_is_a_warning(
    tools_api: tuple[str, Api],
) -> None:
    name, api = tools_api
    api.says(said(name, ("f", '{"c": "red"}')))
    schema = {"type": "object", "properties": {"c": {"type": "string", "format": "color"}}}
    answer = api.post(CHAT, {"messages": [USER], "tools": [tool_of(schema)], **FORCED}).json()
    assert answer["warnings"] == ["tools: f: the format 'color' is not known"]
