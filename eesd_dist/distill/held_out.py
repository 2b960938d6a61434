"""Which prompts a head learns from, and which are kept aside to calibrate and to judge it.

The same file, number and seed give the same three parts in every command, so that no step sees
another one's prompts. Prompts that occur twice are taken once.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eesd_dist.distill.checks import require_positive
from eesd_dist.distill.features import MANIFEST_FILE, FeatureManifest
from eesd_dist.errors import ConfigError, RequestError
from eesd_dist.model.spec import ModelSpec, read_json
from eesd_dist.text.prompts import Prompt, json_lines, load_prompts
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
    num_skipped: int = 0
    """Too long for the target: in none of the parts."""


def split_prompts(prompts: Sequence[Prompt], *, num_held_out: int, seed: int) -> PromptParts:
    """Held out are `num_held_out`, but at most half of a small file; they are calibrated on and
    judged with in equal parts."""
    require_positive(num_held_out=num_held_out)
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
    """Without the prompts that leave the target no room to answer. That is asked of the target
    alone, whatever a command wants beside it: with another filter the parts would be others."""
    room = ModelSpec.from_folder(model).max_position_embeddings - 1
    prompts = load_prompts(Tokenizer.load(model), file)
    fitting = [prompt for prompt in prompts if len(prompt.tokens) <= room]
    num_skipped = len(prompts) - len(fitting)
    try:
        parts = split_prompts(fitting, num_held_out=num_held_out, seed=seed)
    except ConfigError as error:
        skipped = f" ({num_skipped} of more than {room} tokens skipped)" if num_skipped else ""
        raise ConfigError(f"{file}: {error}{skipped}") from error
    return replace(parts, num_skipped=num_skipped)


def require_kept_aside(features: Path, *, num_held_out: int, seed: int) -> None:
    """Raises ConfigError when the features were collected with other prompts kept aside: what was
    learnt from would be judged with. Silent where there are none, or nobody said."""
    if not (features / MANIFEST_FILE).exists():
        return
    manifest = FeatureManifest.read(features)
    if not manifest.plan_sha256:  # no prompts were chosen here: a service wrote them
        return
    for flag, found, wanted in (
        ("--seed", manifest.seed, seed),
        ("--held-out", manifest.num_held_out, num_held_out),
    ):
        if found is not None and found != wanted:
            raise ConfigError(
                f"{features / MANIFEST_FILE}: found features collected with {flag} {found}, asked "
                f"for {wanted}: other prompts would be kept aside; give {flag} {found}"
            )


def require_unseen(head: Path, *, num_held_out: int, seed: int) -> None:
    """The same, for the features that a head says it was trained on, where they still are."""
    provenance = read_json(head / "config.json").get("provenance")
    training = provenance.get("training") if isinstance(provenance, dict) else None
    features = training.get("features") if isinstance(training, dict) else None
    if isinstance(features, str):
        require_kept_aside(Path(features), num_held_out=num_held_out, seed=seed)


def read_texts(model: Path, file: Path) -> list[tuple[int, ...]]:
    """JSON lines of {"text": ...}, as token ids."""
    tokenizer = Tokenizer.load(model)
    return [_encoded(tokenizer, row, where) for where, row in json_lines(file)]


def _encoded(tokenizer: Tokenizer, row: dict[str, Any], where: str) -> tuple[int, ...]:
    text = row.get("text")
    if not isinstance(text, str):
        raise ConfigError(f"{where}: found no `text`, expected one JSON object {{text}} a line")
    try:
        return tokenizer.encode(text)
    except RequestError as error:
        raise ConfigError(f"{where}: {error}") from error
