"""Reads a checkpoint's dimensions, and the measured acceptance of its exit head."""

from collections.abc import Iterable
from itertools import accumulate, takewhile
from operator import mul
from pathlib import Path

import msgspec

from cluster.planning.heads import MeasuredHead
from cluster.planning.shapes import Acceptance, ModelShape
from eesd_dist.bench.costs.form import StageCosts
from eesd_dist.errors import ConfigError
from eesd_dist.model.config_fields import read_json
from eesd_dist.model.heads.head_config import HeadConfig
from eesd_dist.model.spec import ModelSpec

EVALUATION_FILE = "evaluation.json"


def read_shape(folder: Path) -> ModelShape:
    """Reads the config.json in a checkpoint's folder. Raises CheckpointError for a model that is
    not supported.

    On a CPU, matrices are as wide as on a GPU (16-bit weights are packed as float16); keys and
    values have a type of their own.
    """
    spec = ModelSpec.from_folder(folder)
    config = read_json(folder / "config.json")
    dtype = str(config.get("dtype") or config.get("torch_dtype"))
    num_bytes = 4 if dtype.removeprefix("torch.") == "float32" else 2
    return ModelShape(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        max_positions=spec.max_position_embeddings,
        norms_heads_jointly=spec.traits.joint_qk_norm,
        num_ropes=len(set(spec.ropes)),
        bytes_per_weight=num_bytes,
        bytes_per_kv=num_bytes,
        bytes_per_activation=num_bytes,
    )


class _Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    rate: float
    by_position: tuple[float, ...]


class _AtTemperature(msgspec.Struct, frozen=True, kw_only=True):
    temperature: float
    acceptance: _Acceptance


class _Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The part of evaluation.json that is read here."""

    temperatures: tuple[_AtTemperature, ...]


def read_head(folder: Path, *, model: Path, temperature: float) -> MeasuredHead:
    """Reads what `eesd distill evaluate` measured of a head at one temperature.

    Raises ConfigError for a head of another model, and for one without that measurement.
    """
    config = HeadConfig.read(folder, target=ModelSpec.from_folder(model), target_path=model)
    file = folder / EVALUATION_FILE
    try:
        evaluation = msgspec.json.decode(file.read_bytes(), type=_Evaluation)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{file}: {error}: expected the acceptance of the head: measure it with `eesd distill "
            "evaluate`, or give --acceptance"
        ) from error
    for at in evaluation.temperatures:
        if at.temperature == temperature:
            # A position that no round has tested has 0.
            tested = takewhile(bool, at.acceptance.by_position)
            return MeasuredHead(
                exit_layer=config.exit_layer,
                draft_vocab_size=config.draft_vocab_size if config.kind == "truncated" else None,
                acceptance=_measured(accumulate(tested, mul), rate=at.acceptance.rate),
            )
    temperatures = ", ".join(f"{at.temperature:g}" for at in evaluation.temperatures)
    raise ConfigError(
        f"{file}: found acceptance at the temperatures {temperatures or 'of no text'}, expected "
        f"one at {temperature:g}: choose another --temperature, or evaluate the head at this one"
    )


def head_of_costs(costs: StageCosts) -> MeasuredHead:
    """Returns the head that drafted while the costs were measured."""
    model, survival = costs.model, costs.survival
    is_truncated = model.draft_vocab_size < model.vocab_size
    return MeasuredHead(
        exit_layer=model.exit_layer,
        draft_vocab_size=model.draft_vocab_size if is_truncated else None,
        acceptance=_measured(survival, rate=survival[-1] ** (1 / len(survival))),
    )


def _measured(survival: Iterable[float], *, rate: float) -> Acceptance:
    return Acceptance(rate=rate, survival=tuple(survival), is_measured=True)
