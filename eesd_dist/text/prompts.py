"""Prompts from a JSON-lines file: for benchmarks, distillation, profiles.

A line has `messages` (chat) or `prompt` (raw text), and may have a `class`. Lines in the format of
GSM8K (`question`) are read as chat.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from eesd_dist.errors import ConfigError, RequestError
from eesd_dist.text.tokenizer import Tokenizer
from eesd_dist.types import TokenId


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    workload: str
    tokens: tuple[TokenId, ...]


def load_prompts(tokenizer: Tokenizer, path: Path, *, limit: int | None = None) -> list[Prompt]:
    """Returns the file's prompts in order. Raises ConfigError that names an invalid line."""
    prompts = [_prompt(tokenizer, row, where) for where, row in json_lines(path)]
    if not prompts:
        raise ConfigError(f"{path}: found no prompts, expected one JSON object a line")
    return prompts[:limit]


def prompts_of_context(prompts: Sequence[Prompt], context: int, *, limit: int) -> list[Prompt]:
    """Returns up to `limit` prompts of exactly `context` tokens: the end of several prompts, one
    after another, repeated if they are too few."""
    texts: list[Prompt] = []
    for last in range(min(limit, len(prompts))):
        before = [*reversed(prompts[:last]), *reversed(prompts[last + 1 :])]
        tokens = prompts[last].tokens
        for prompt in cycle(before or prompts):
            if len(tokens) >= context:
                break
            tokens = prompt.tokens + tokens
        texts.append(Prompt(workload="context", tokens=tokens[-context:]))
    return texts


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the objects of a file, each with its place (`file:line`). Skips blank lines. Raises
    ConfigError that names an invalid line."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file, expected JSON lines")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{path}:{number}", _object(line, f"{path}:{number}")


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8 ({error})") from error
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: found {type(row).__name__}, expected a JSON object")
    return row


def _prompt(tokenizer: Tokenizer, row: dict[str, Any], where: str) -> Prompt:
    if "question" in row:
        row = {"class": "gsm8k", "messages": [{"role": "user", "content": row["question"]}]}
    try:
        if "messages" in row:
            tokens = tokenizer.encode_chat(_messages(row["messages"], where))
        elif "prompt" in row:
            text = _text(row["prompt"], "prompt", where)
            tokens = tokenizer.encode(text) if text else ()
        else:
            raise ConfigError(
                f"{where}: found {sorted(row)}, expected `messages`, `prompt` or `question`"
            )
    except RequestError as error:
        raise ConfigError(f"{where}: {error}") from error
    if not tokens:
        raise ConfigError(f"{where}: found an empty prompt, expected at least one token")
    return Prompt(
        workload=str(row.get("class", "default")), tokens=tuple(TokenId(t) for t in tokens)
    )


def _messages(messages: object, where: str) -> list[dict[str, Any]]:
    if not (
        isinstance(messages, list)
        and messages
        and all(isinstance(message, dict) for message in messages)
    ):
        raise ConfigError(f"{where}: found messages {messages!r:.80}, expected a list of objects")
    for message in messages:
        _text(message.get("role"), "role", where)
        _text(message.get("content"), "content", where)
    return messages


def _text(content: object, name: str, where: str) -> str:
    if not isinstance(content, str):
        raise ConfigError(f"{where}: found {name} {content!r:.80}, expected a string")
    return content
