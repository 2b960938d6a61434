"""Splits prompts into those for training and those held out for calibration and evaluation.

Equal choices (file, number, seed) give equal parts in every step, so that no step uses the prompts
of another. Duplicate prompts count once.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from eesd_dist.checks import require_positive
from eesd_dist.distill.features import MANIFEST_FILE, FeatureManifest
from eesd_dist.errors import ConfigError, RequestError
from eesd_dist.model.config_fields import read_json
from eesd_dist.model.spec import ModelSpec
from eesd_dist.text.prompts import Prompt, json_lines, load_prompts
from eesd_dist.text.tokenizer import Tokenizer

SHIPPED_PROMPTS = Path(__file__).with_name("prompts.jsonl")
"""Problems, code, passages and instructions for the bundled model; `infra/demo_model` has their
source."""
NUM_HELD_OUT = 64
_SMALLEST_FILE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptParts:
    learnt: tuple[Prompt, ...]
    calibrated: tuple[Prompt, ...]
    judged: tuple[Prompt, ...]
    num_skipped: int = 0
    """Prompts that are too long for the target, in none of the parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChoice:
    """A file of prompts and how it is split."""

    prompts: Annotated[Path, "prompts, as for collecting"] = SHIPPED_PROMPTS
    held_out: Annotated[int, "number of held-out prompts, as for collecting"] = NUM_HELD_OUT
    seed: Annotated[int, "as for collecting: determines the held-out prompts"] = 0

    def __post_init__(self) -> None:
        require_positive(self, "held_out")

    def read(self, model: Path) -> PromptParts:
        """Reads and splits the prompts, without those that leave the target no room to answer. The
        filter depends on the target only: with a separate one per step the parts would differ."""
        room = ModelSpec.from_folder(model).max_position_embeddings - 1
        prompts = load_prompts(Tokenizer.load(model), self.prompts)
        fitting = [prompt for prompt in prompts if len(prompt.tokens) <= room]
        num_skipped = len(prompts) - len(fitting)
        try:
            split = self.split(fitting)
        except ConfigError as error:
            skipped = f" ({num_skipped} of more than {room} tokens skipped)" if num_skipped else ""
            raise ConfigError(f"{self.prompts}: {error}{skipped}") from error
        return replace(split, num_skipped=num_skipped)

    def split(self, prompts: Sequence[Prompt]) -> PromptParts:
        """Holds out `held_out` prompts, at most half of a small file: one half of them for
        calibration, the other for evaluation."""
        once = list(dict.fromkeys(prompts))
        if len(once) < _SMALLEST_FILE:
            raise ConfigError(
                f"found {len(once)} different prompts, expected at least {_SMALLEST_FILE}, for "
                "training, calibration and evaluation: add prompts"
            )
        random.Random(f"prompts/{self.seed}").shuffle(once)
        held = max(2, min(self.held_out, len(once) // 2))
        return PromptParts(
            calibrated=tuple(once[: held // 2]),
            judged=tuple(once[held // 2 : held]),
            learnt=tuple(once[held:]),
        )

    def require_unseen_by(self, head: Path) -> None:
        """Raises ConfigError if the head was trained on features with other held-out prompts; only
        checked if the features are still in their folder."""
        provenance = read_json(head / "config.json").get("provenance")
        training = provenance.get("training") if isinstance(provenance, dict) else None
        features = training.get("features") if isinstance(training, dict) else None
        if isinstance(features, str):
            self.require_kept_aside_from(Path(features))

    def require_kept_aside_from(self, features: Path) -> None:
        """Raises ConfigError if the features were collected with other held-out prompts: the head
        would be evaluated on its training data. Features may be absent."""
        if not (features / MANIFEST_FILE).exists():
            return
        manifest = FeatureManifest.read(features)
        if not manifest.plan_sha256:  # written by a service, which chose no prompts
            return
        for flag, stored, requested in (
            ("--seed", manifest.seed, self.seed),
            ("--held-out", manifest.num_held_out, self.held_out),
        ):
            if stored is not None and stored != requested:
                raise ConfigError(
                    f"{features / MANIFEST_FILE}: found features collected with {flag} {stored}, "
                    f"asked for {requested}: other prompts would be held out; use {flag} {stored}"
                )


def read_texts(model: Path, file: Path) -> list[tuple[int, ...]]:
    """Reads JSON lines of {"text": ...}; returns token ids."""
    tokenizer = Tokenizer.load(model)
    return [_encoded(tokenizer, row, where) for where, row in json_lines(file)]


def _encoded(tokenizer: Tokenizer, row: dict[str, Any], where: str) -> tuple[int, ...]:
    text = row.get("text")
    if not isinstance(text, str):
        raise ConfigError(f"{where}: found no `text`, expected one JSON object {{text}} per line")
    try:
        return tokenizer.encode(text)
    except RequestError as error:
        raise ConfigError(f"{where}: {error}") from error
