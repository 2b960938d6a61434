"""Splits prompts into those a head learns from and those kept aside to calibrate and judge it.

Equal choices (file, number, seed) give equal parts in every step, so that no step sees the prompts
of another. Prompts that occur twice count once.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from eesd_dist.checks import require_positive
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChoice:
    """A file of prompts and how it is split."""

    prompts: Annotated[Path, "the file that was collected from"] = SHIPPED_PROMPTS
    held_out: Annotated[int, "prompts kept aside when it was"] = NUM_HELD_OUT
    seed: Annotated[int, "as when collecting: it says which prompts are kept aside"] = 0

    def __post_init__(self) -> None:
        require_positive(self, "held_out")

    def read(self, model: Path) -> PromptParts:
        """Skips prompts that leave the target no room to answer. This depends on the target alone:
        with a filter of each step's own, the parts would differ."""
        room = ModelSpec.from_folder(model).max_position_embeddings - 1
        prompts = load_prompts(Tokenizer.load(model), self.prompts)
        fitting = [prompt for prompt in prompts if len(prompt.tokens) <= room]
        num_skipped = len(prompts) - len(fitting)
        try:
            parts = self.split(fitting)
        except ConfigError as error:
            skipped = f" ({num_skipped} of more than {room} tokens skipped)" if num_skipped else ""
            raise ConfigError(f"{self.prompts}: {error}{skipped}") from error
        return replace(parts, num_skipped=num_skipped)

    def split(self, prompts: Sequence[Prompt]) -> PromptParts:
        """Holds out `held_out` prompts, at most half of a small file: one half of them to calibrate
        on, the other to judge with."""
        once = list(dict.fromkeys(prompts))
        if len(once) < _SMALLEST_FILE:
            raise ConfigError(
                f"found {len(once)} different prompts, expected at least {_SMALLEST_FILE}: some "
                "are learnt from, some calibrated on, some judged with"
            )
        random.Random(f"prompts/{self.seed}").shuffle(once)
        held = max(2, min(self.held_out, len(once) // 2))
        return PromptParts(
            calibrated=tuple(once[: held // 2]),
            judged=tuple(once[held // 2 : held]),
            learnt=tuple(once[held:]),
        )

    def require_unseen_by(self, head: Path) -> None:
        """Raises ConfigError when the head was trained on features, still in their folder, that
        were collected with other prompts kept aside."""
        provenance = read_json(head / "config.json").get("provenance")
        training = provenance.get("training") if isinstance(provenance, dict) else None
        features = training.get("features") if isinstance(training, dict) else None
        if isinstance(features, str):
            self.require_kept_aside_from(Path(features))

    def require_kept_aside_from(self, features: Path) -> None:
        """Raises ConfigError when the features were collected with other prompts kept aside: the
        head would be judged with what it has learnt from. Features may be absent."""
        if not (features / MANIFEST_FILE).exists():
            return
        manifest = FeatureManifest.read(features)
        if not manifest.plan_sha256:  # written by a service, which chose no prompts
            return
        for flag, found, wanted in (
            ("--seed", manifest.seed, self.seed),
            ("--held-out", manifest.num_held_out, self.held_out),
        ):
            if found is not None and found != wanted:
                raise ConfigError(
                    f"{features / MANIFEST_FILE}: found features collected with {flag} {found}, "
                    f"asked for {wanted}: other prompts would be kept aside; give {flag} {found}"
                )


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
