"""Streams as the load clients of the field read them: line by line, with JSON in every line."""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx
import pytest

from tests.unit.serve_app.openai.conftest import Api

Chunk = dict[str, Any]
BODIES = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}
OPTIONS = {"max_tokens": 24, "seed": 1, "stream_options": {"include_usage": True}}


def without_prefix(lines: Iterable[bytes]) -> Iterator[Chunk]:
    """As vLLM's benchmark: strips a line, removes `data: ` if it is there."""
    for line in lines:
        text = line.strip().decode()
        if text and not text.startswith(":"):
            text = text.removeprefix("data: ")
            if text != "[DONE]":
                yield json.loads(text)


def without_comments(lines: Iterable[bytes]) -> Iterator[Chunk]:
    """As SGLang's benchmark: knows of no comments, and that the last line is no JSON."""
    for line in lines:
        if line.strip():
            text = line.strip().decode()
            text = text[len("data: ") :] if text.startswith("data: ") else text
            if text == "[DONE]":
                continue
            yield json.loads(text)


def cut(lines: Iterable[bytes]) -> Iterator[Chunk]:
    """As llmperf: cuts off as many characters as `data: ` has."""
    for line in lines:
        if line.strip():
            text = line.strip()[len("data: ") :]
            if text != b"[DONE]":
                yield json.loads(text)


@pytest.mark.parametrize("chunks_of", [without_prefix, without_comments, cut])
@pytest.mark.parametrize("path", BODIES)
def test_a_reader_of_lines_gets_the_whole_text(
    api: Api, path: str, chunks_of: Callable[[Iterable[bytes]], Iterator[Chunk]]
) -> None:
    body = {**BODIES[path], **OPTIONS}
    whole = api.post(path, {**body, "stream_options": None}).json()
    api.engine.group = 2
    with httpx.stream("POST", api.url + path, json={**body, "stream": True}, timeout=20) as answer:
        assert answer.status_code == 200
        chunks = list(chunks_of(line.encode() for line in answer.iter_lines()))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    texts = [choice.get("text") or choice.get("delta", {}).get("content") for choice in choices]
    (expected,) = whole["choices"]
    assert "".join(text or "" for text in texts) == (
        expected["text"] if "text" in expected else expected["message"]["content"]
    )
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 24
    assert len(chunks) > 5
