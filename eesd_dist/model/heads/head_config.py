"""Reads and writes an exit head's config.json: its target, exit layer and kind of LM head.

The layout is that of the speculators library (config.json next to model.safetensors), so that its
tools recognise the parts they support. Refuses a head that does not fit the target: with hidden
states of another model or layer its drafts would be useless and cost as much.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self, get_args

from eesd_dist.errors import CheckpointError
from eesd_dist.model.config_fields import read_json
from eesd_dist.model.heads.head_files import head_digest, target_digest
from eesd_dist.model.spec import ModelSpec
from eesd_dist.removed import replacement_of

HeadKind = Literal["shared", "own", "truncated"]
"""LM head: the target's, a trained copy of it, or one over the draft vocabulary only."""

MODEL_TYPE = "early_exit"
_EMBEDDING = "reads_embedding"
"""A removed key: true in the configuration of a head that cannot draft any more."""
LAYOUT_VERSION = "0.3.0"
"""Version of the speculators layout in files written here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierIdentity:
    """Identifies the target that a head was made for."""

    name_or_path: str
    architectures: tuple[str, ...]
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    sha256: str
    """Over config.json and, where there is one, tokenizer.json."""

    @classmethod
    def of(cls, path: Path, spec: ModelSpec) -> Self:
        return cls(
            name_or_path=path.resolve().name,
            architectures=(spec.architecture,),
            num_hidden_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            vocab_size=spec.vocab_size,
            sha256=target_digest(path),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Configuration of one exit head."""

    exit_layer: int
    """The head reads hidden states after this many layers of the target."""
    kind: HeadKind
    draft_vocab_size: int
    verifier: VerifierIdentity
    layer_config: Mapping[str, object]
    """The one decoder layer, as a Hugging Face config of a model with a single layer."""
    layer: ModelSpec

    @classmethod
    def for_target(
        cls,
        path: Path,
        target: ModelSpec,
        *,
        exit_layer: int,
        kind: HeadKind,
        num_tokens: int,
    ) -> Self:
        file = path / "config.json"
        if not 0 < exit_layer < target.num_layers:
            raise CheckpointError(
                file=file,
                found=f"{target.num_layers} layers",
                expected=f"more than the exit layer {exit_layer}, which must be at least 1",
            )
        layer_config = single_layer_config(read_json(file), target)
        return cls(
            exit_layer=exit_layer,
            kind=kind,
            draft_vocab_size=num_tokens,
            verifier=VerifierIdentity.of(path, target),
            layer_config=layer_config,
            layer=ModelSpec.from_config(layer_config, file=file),
        )

    @classmethod
    def read(cls, folder: Path, *, target: ModelSpec, target_path: Path) -> Self:
        """Reads a head's folder. Raises CheckpointError when the head does not fit the target."""
        file = folder / "config.json"
        config = read_json(file)
        _expect(file, "speculators_model_type", config.get("speculators_model_type"), MODEL_TYPE)
        identity = VerifierIdentity.of(target_path, target)
        speculators_config = _object(config.get("speculators_config"), file, "speculators_config")
        _require_same(file, _object(speculators_config.get("verifier"), file, "verifier"), identity)
        exit_layer = config.get("exit_layer")
        if not isinstance(exit_layer, int) or not 0 < exit_layer < target.num_layers:
            raise CheckpointError(
                file=file,
                found=f"exit_layer {exit_layer!r}",
                expected=f"1 to {target.num_layers - 1}",
            )
        layer_config = _object(config.get("transformer_layer_config"), file, "layer config")
        layer = ModelSpec.from_config(layer_config, file=file)
        _expect(file, "hidden_size of the layer", layer.hidden_size, target.hidden_size)
        _expect(file, "num_hidden_layers of the head", layer.num_layers, 1)
        kind = _kind(config.get("head_type"), file)
        draft_vocab_size = config.get("draft_vocab_size")
        if not isinstance(draft_vocab_size, int) or not 0 < draft_vocab_size <= target.vocab_size:
            raise CheckpointError(
                file=file,
                found=f"draft_vocab_size {draft_vocab_size!r}",
                expected=f"1 to {target.vocab_size}, the target's vocabulary",
            )
        if kind != "truncated":
            _expect(file, "draft_vocab_size", draft_vocab_size, target.vocab_size)
        if config.get(_EMBEDDING):
            raise CheckpointError(
                file=file,
                found="a head that reads the embedding",
                expected="one that reads hidden states alone",
                advice=replacement_of(_EMBEDDING) or "",
            )
        return cls(
            exit_layer=exit_layer,
            kind=kind,
            draft_vocab_size=draft_vocab_size,
            verifier=identity,
            layer_config=layer_config,
            layer=layer,
        )

    def to_json(self, *, dtype: str, provenance: Mapping[str, object]) -> dict[str, object]:
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": 8,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        return {
            "architectures": ["EarlyExitSpeculator"],
            "speculators_model_type": MODEL_TYPE,
            "speculators_version": LAYOUT_VERSION,
            "speculators_config": {
                "algorithm": MODEL_TYPE,
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": asdict(self.verifier),
            },
            "exit_layer": self.exit_layer,
            "head_type": self.kind,
            "tie_lm_head": self.kind == "shared",
            "draft_vocab_size": self.draft_vocab_size,
            "hidden_size": self.layer.hidden_size,
            "target_hidden_size": self.verifier.hidden_size,
            "transformer_layer_config": dict(self.layer_config),
            "dtype": dtype,
            "provenance": dict(provenance),
        }


def single_layer_config(config: Mapping[str, object], target: ModelSpec) -> dict[str, object]:
    """Returns the target's config, reduced to its last layer."""
    single = {**config, "num_hidden_layers": 1}
    windows = target.sliding_windows
    if config.get("layer_types") is not None or len(set(windows)) > 1:
        single["layer_types"] = ["full_attention" if windows[-1] is None else "sliding_attention"]
    return single


def _require_same(file: Path, verifier: Mapping[str, object], expected: VerifierIdentity) -> None:
    for key in ("num_hidden_layers", "hidden_size", "vocab_size"):
        _expect(file, f"verifier {key}", verifier.get(key), getattr(expected, key))
    if verifier.get("sha256") != expected.sha256:
        raise CheckpointError(
            file=file,
            found=f"a head made for {verifier.get('name_or_path')!r}",
            expected=f"one made for {expected.name_or_path!r}: the hashes of config.json and "
            "tokenizer.json differ",
            advice="train a head for this target with `eesd distill`, or configure the right one",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadIdentity:
    """Identifies the files of a head; the ranks of a group compare it to agree on one head."""

    folder: str
    sha256: str

    @classmethod
    def of(cls, folder: Path) -> Self:
        return cls(folder=str(folder), sha256=head_digest(folder))


def _expect(file: Path, what: str, actual: object, expected: object) -> None:
    if actual != expected:
        raise CheckpointError(
            file=file, found=f"{what} {actual!r}", expected=f"{expected!r} to fit the target"
        )


def _object(value: object, file: Path, what: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise CheckpointError(file=file, found=f"{what} {value!r}", expected="an object")
    return value


def _kind(value: object, file: Path) -> HeadKind:
    for kind in get_args(HeadKind):
        if value == kind:
            head_kind: HeadKind = kind
            return head_kind
    raise CheckpointError(
        file=file, found=f"head_type {value!r}", expected=f"one of {', '.join(get_args(HeadKind))}"
    )
