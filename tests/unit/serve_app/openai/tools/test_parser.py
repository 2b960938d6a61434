"""Calls and content of a text do not depend on the pieces in which it comes."""

import random
import time
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from serve_app.openai.tools import ToolCallParser, ToolFormat
from serve_app.openai.tools.formats import HERMES, LLAMA3, MISTRAL

F, G = ("f", '{"a": "x}\\"]", "b": [1, {"c": 2}]}'), ("g", '{"z": 1}')


class Case(NamedTuple):
    form: ToolFormat
    text: str
    content: str
    calls: Sequence[tuple[str, str]]


CASES = {
    "text": Case(HERMES, "  \n hello \n ", "  \n hello \n ", []),
    "one": Case(
        HERMES,
        f'<tool_call>\n{{"name": "f", "arguments": {F[1]}}}\n</tool_call>',
        "",
        [F],
    ),
    "two after text": Case(
        HERMES,
        f'Let me see.\n<tool_call>\n{{"name": "f", "arguments": {F[1]}}}\n</tool_call>\n'
        f'<tool_call>\n{{"arguments": {G[1]} , "name" : "g"}}\n</tool_call>\n',
        "Let me see.",
        [F, G],
    ),
    "nothing after the mark": Case(HERMES, "a < b <tool_call> no {", "a < b <tool_call> no {", []),
    "a name that is none": Case(
        HERMES, '<tool_call>{"name": 3}</tool_call> ok', '<tool_call>{"name": 3}</tool_call> ok', []
    ),
    "cut": Case(HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    "cut before the name": Case(HERMES, 'x <tool_call>{"na', 'x <tool_call>{"na', []),
    "cut in the mark": Case(HERMES, "x\n<tool_c", "x\n<tool_c", []),
    "cut after the call": Case(
        HERMES, '<tool_call>{"name": "f", "arguments": {}}\n</tool', "", [("f", "{}")]
    ),
    "not closed": Case(
        HERMES, '<tool_call>{"name": "f", "arguments": {}} and more', "and more", [("f", "{}")]
    ),
    "no arguments": Case(HERMES, '<tool_call>{"name":"f"}</tool_call>\n', "", [("f", "{}")]),
    "null": Case(HERMES, '<tool_call>{"name":"f","arguments": null}', "", [("f", "{}")]),
    "a list": Case(
        LLAMA3,
        f'{{"name": "f", "parameters": {F[1]}}}; {{"name": "g", "parameters": {G[1]}}}',
        "",
        [F, G],
    ),
    "a tool that is none": Case(
        LLAMA3,
        ' {"name": "other", "parameters": {"q": "x"}} tail',
        ' {"name": "other", "parameters": {"q": "x"}} tail',
        [],
    ),
    "JSON": Case(LLAMA3, '{"a": 1, "b": [2]}', '{"a": 1, "b": [2]}', []),
    "an empty object": Case(LLAMA3, "{} ", "{} ", []),
    "no JSON": Case(LLAMA3, "{a: 1}", "{a: 1}", []),
    "a mark": Case(
        LLAMA3, '<|python_tag|>{"name": "zz", "parameters": {"q": 1}}', "", [("zz", '{"q": 1}')]
    ),
    "later in the text": Case(
        LLAMA3, 'Hi {"name": "f", "parameters": {}}', 'Hi {"name": "f", "parameters": {}}', []
    ),
    "Mistral": Case(
        MISTRAL,
        f'[TOOL_CALLS][{{"name": "f", "arguments": {F[1]}}}, '
        '{"name": "g", "arguments": "{\\"z\\": 1}", "id": "x"}]',
        "",
        [F, G],
    ),
    "Mistral, none": Case(MISTRAL, "[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
    "Mistral, nearly": Case(
        MISTRAL,
        'see [TOOL and [TOOL_CALLS] [{"name": "f", "arguments": null}]',
        "see [TOOL and",
        [("f", "{}")],
    ),
    "the key of another format": Case(
        LLAMA3, '{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]
    ),
    "arguments twice": Case(
        HERMES,
        '<tool_call>{"name":"f","arguments":{"a":1},"arguments":{"b":2},"parameters":3}',
        "",
        [("f", '{"a":1}')],
    ),
    "escapes": Case(
        HERMES,
        r'<tool_call>{"na\u006de": "f", "arguments": {"a": "\\\" }"}}</tool_call>',
        "",
        [("f", r'{"a": "\\\" }"}')],
    ),
    "blanks": Case(HERMES, " " * 500, " " * 500, []),
}


def read(
    form: ToolFormat, chunks: Sequence[str], *, max_calls: int | None = None
) -> tuple[str, list[tuple[str, str]], list[str]]:
    parser = ToolCallParser(form, names=["f", "g"], seed="s", max_calls=max_calls)
    content, calls, ids = "", list[tuple[str, str]](), list[str]()
    for parsed in [*map(parser.feed, chunks), parser.finish()]:
        content += parsed.content
        for call in parsed.calls:
            if call.id is not None:
                assert call.index == len(calls)
                ids.append(call.id)
                calls.append((call.name or "", call.arguments))
            else:
                assert call.index == len(calls) - 1
                name, arguments = calls[-1]
                calls[-1] = (name, arguments + call.arguments)
    return content, calls, ids


@pytest.mark.parametrize("name", CASES)
def test_calls_are_found_in_whatever_pieces_the_text_comes(name: str) -> None:
    form, text, content, calls = CASES[name]
    expected = read(form, [text])
    assert expected[:2] == (content, list(calls))
    for seed in range(20):
        rng, remainder, chunks = random.Random(seed), text, list[str]()
        while remainder:
            size = rng.randint(1, 7)
            chunks.append(remainder[:size])
            remainder = remainder[size:]
        assert read(form, chunks) == expected


@pytest.mark.parametrize("name", CASES)
def test_what_was_made_of_a_beginning_stays(name: str) -> None:
    """A resumed stream feeds what was shown again, and goes on."""
    form, text, content, calls = CASES[name]
    for at in range(len(text)):
        first = ToolCallParser(form, names=["f", "g"], seed="s")
        prefix = first.feed(text[:at])
        suffix = [first.feed(text[at:]), first.finish()]
        assert prefix.content + "".join(parsed.content for parsed in suffix) == content
        arguments = [""] * len(calls)
        for delta in (call for parsed in (prefix, *suffix) for call in parsed.calls):
            arguments[delta.index] += delta.arguments
        assert arguments == [text for _, text in calls]


def test_only_so_many_calls_are_shown() -> None:
    form, text, _, _ = CASES["two after text"]
    content, calls, ids = read(form, [text], max_calls=1)
    assert (content, calls, len(ids)) == ("Let me see.", [F], 1)


def test_ids_differ_and_have_the_length_that_templates_ask_for() -> None:
    _, _, ids = read(MISTRAL, [CASES["Mistral"].text])
    assert len(set(ids)) == 2
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)
    assert ids == read(MISTRAL, [CASES["Mistral"].text])[2]


def test_arguments_come_as_they_are_written() -> None:
    parser = ToolCallParser(HERMES, names=[], seed="s")
    parser.feed('<tool_call>{"name": "f", "arguments": {')
    (delta,) = parser.feed('"a": "long te').calls
    assert delta.arguments == '"a": "long te'


@pytest.mark.parametrize("unit", ["x", '", "', "[", "\\n", " y "])
def test_long_arguments_take_linear_time(unit: str) -> None:
    def seconds(count: int) -> float:
        parser = ToolCallParser(LLAMA3, names=["f"], seed="s")
        text = '{"name": "f", "parameters": {"a": "' + unit * count
        began_s = time.process_time()
        (call,) = parser.feed(text).calls
        took_s = time.process_time() - began_s
        assert call.arguments == text[text.index('{"a"') :]
        return took_s

    short_s = max(min(seconds(4_000) for _ in range(3)), 1e-4)
    assert min(seconds(64_000) for _ in range(3)) < 16 * 6 * short_s


def test_a_long_object_without_a_name_is_content() -> None:
    parser = ToolCallParser(LLAMA3, names=["f"], seed="s")
    text = "{" + " " * 200_000
    assert parser.feed(text).content == ""
    assert parser.finish().content == text
