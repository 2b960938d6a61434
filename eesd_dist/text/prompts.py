"""Prompts from a JSON-lines file: for benchmarks, distillation, profiles.

A line has `messages` (chat) or `prompt` (raw text), and may name its `class`; lines in GSM8K's own
form (`question`) are taken as chat.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eesd_dist.errors import ConfigError
from eesd_dist.text.tokenizer import Tokenizer
from eesd_dist.types import TokenId


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    workload: str
    tokens: tuple[TokenId, ...]


def load_prompts(tokenizer: Tokenizer, path: Path, *, limit: int | None = None) -> list[Prompt]:
    """Prompts in order; raises ConfigError naming the line that cannot be used."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file, expected JSON lines with prompts")
    prompts: list[Prompt] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                prompts.append(_prompt(tokenizer, line, f"{path}:{number}"))
    if not prompts:
        raise ConfigError(f"{path}: found no prompts, expected one JSON object a line")
    return prompts[:limit]


def _prompt(tokenizer: Tokenizer, line: str, where: str) -> Prompt:
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error})") from error
    if "question" in row:
        row = {"class": "gsm8k", "messages": [{"role": "user", "content": row["question"]}]}
    if "messages" in row:
        tokens = tokenizer.encode_chat(row["messages"])
    elif "prompt" in row:
        tokens = tokenizer.encode(row["prompt"])
    else:
        raise ConfigError(
            f"{where}: found {sorted(row)}, expected `messages`, `prompt` or `question`"
        )
    return Prompt(
        workload=str(row.get("class", "default")), tokens=tuple(TokenId(t) for t in tokens)
    )
