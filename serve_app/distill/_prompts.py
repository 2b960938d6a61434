"""Which prompts a head learns from, and which are kept aside to calibrate and to judge it.

The same file, number and seed give the same three parts in every command, so that no step sees
another one's prompts. Prompts that occur twice are taken once.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eesd_dist.errors import ConfigError
from eesd_dist.text.prompts import Prompt, load_prompts
from eesd_dist.text.tokenizer import Tokenizer

SHIPPED_PROMPTS = Path(__file__).with_name("prompts.jsonl")
"""Arithmetic as chat and raw code, for the bundled model; `infra/demo_model` says where from."""
NUM_HELD_OUT = 64
_SMALLEST_FILE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptParts:
    learnt: tuple[Prompt, ...]
    calibrated: tuple[Prompt, ...]
    judged: tuple[Prompt, ...]


def split_prompts(prompts: Sequence[Prompt], *, num_held_out: int, seed: int) -> PromptParts:
    """Held out are `num_held_out`, but at most half of a small file; they are calibrated on and
    judged with in equal parts."""
    once = list(dict.fromkeys(prompts))
    if len(once) < _SMALLEST_FILE:
        raise ConfigError(
            f"found {len(once)} different prompts, expected at least {_SMALLEST_FILE}: some are "
            "learnt from, some calibrated on, some judged with"
        )
    random.Random(f"prompts/{seed}").shuffle(once)
    held = max(2, min(num_held_out, len(once) // 2))
    return PromptParts(
        calibrated=tuple(once[: held // 2]),
        judged=tuple(once[held // 2 : held]),
        learnt=tuple(once[held:]),
    )


def read_prompts(model: Path, file: Path, *, num_held_out: int, seed: int) -> PromptParts:
    prompts = load_prompts(Tokenizer.load(model), file)
    return split_prompts(prompts, num_held_out=num_held_out, seed=seed)


def read_texts(model: Path, file: Path) -> list[tuple[int, ...]]:
    """JSON lines of {"text": ...}, as token ids."""
    if not file.is_file():
        raise ConfigError(f"{file}: no such file, expected JSON lines of {{text}}")
    tokenizer = Tokenizer.load(model)
    texts: list[tuple[int, ...]] = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                texts.append(tokenizer.encode(_text(line, f"{file}:{number}")))
    return texts


def _text(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error})") from error
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f"{where}: found no `text`, expected one JSON object {{text}} a line")
    return text
