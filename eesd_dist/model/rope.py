"""Rotary positions: the angle of each pair of channels at each position.

Computes the angles as transformers does (default, linear, dynamic, llama3, yarn, longrope), in
float32 and in the same order of operations. Does not depend on layers, pages or requests.

A key, once written, must not depend on later tokens. Positions of `dynamic` therefore end at the
`max_position_embeddings` of the file: within them it equals the default rope; past them it would
rotate keys that are already written, so that nothing is computed there. In the same way `longrope`
ends where transformers changes from short to long factors (`positions.num_positions`).
"""

import math
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eesd_dist.errors import CheckpointError
from eesd_dist.model.config_keys import refuse_unread_rope_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Angles of one model, without tensors, so that specs can be compared and sent."""

    kind: str
    inverse_frequencies: tuple[float, ...]
    """Inverse frequency of each rotated pair of channels; float32 values."""
    attention_scaling: float
    """Factor of cosine and sine (yarn, longrope); 1 for other types."""
    head_dim: int

    @property
    def rotary_dim(self) -> int:
        """Number of rotated channels of a head, its first ones."""
        return 2 * len(self.inverse_frequencies)


# Shapes: S positions, E pairs of channels (head_dim / 2), R rotated pairs.
def rotation_table(rope: RopeSpec, *, num_positions: int, device: torch.device) -> Tensor:
    """Returns [S, E] complex64: a pair (a + ib) times entry (s, e) is rotated to position s.
    Entries of pairs that are not rotated are 1.

    Angles are float32 products as in transformers; cosine and sine are taken in float64, so that
    an entry is the same number whichever vector instruction computed it.
    """
    inverse_R = torch.tensor(rope.inverse_frequencies, dtype=torch.float32)
    angles_SR = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse_R
    angles_SR = angles_SR.double()
    table_SE = torch.ones(num_positions, rope.head_dim // 2, dtype=torch.complex64)
    table_SE[:, : len(inverse_R)] = torch.complex(
        angles_SR.cos().float() * rope.attention_scaling,
        angles_SR.sin().float() * rope.attention_scaling,
    )
    return table_SE.to(device)


def rotation_tables(
    ropes: Sequence[RopeSpec], *, num_positions: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Returns the table of each layer; layers with the same rope share one."""
    tables = {
        rope: rotation_table(rope, num_positions=num_positions, device=device)
        for rope in dict.fromkeys(ropes)
    }
    return tuple(tables[rope] for rope in ropes)


def interleave_pairs(rows: Tensor, rope: RopeSpec) -> Tensor:
    """Reorders rows [heads * head_dim, ...] so that the two channels of a pair are adjacent.

    Checkpoints pair channel e with channel e + rotary_dim/2; complex multiplication needs them
    adjacent. Queries and keys are permuted equally, so that no attention score changes.
    """
    heads = rows.reshape(-1, rope.head_dim, *rows.shape[1:])
    end = rope.rotary_dim
    ordered = heads.new_empty(heads.shape)
    ordered[:, 0:end:2] = heads[:, : end // 2]
    ordered[:, 1:end:2] = heads[:, end // 2 : end]
    ordered[:, end:] = heads[:, end:]
    return ordered.view(rows.shape)


def separate_pairs(rows: Tensor, rope: RopeSpec) -> Tensor:
    """Restores the checkpoint's order: the inverse of `interleave_pairs`."""
    heads = rows.reshape(-1, rope.head_dim, *rows.shape[1:])
    end = rope.rotary_dim
    ordered = heads.new_empty(heads.shape)
    ordered[:, : end // 2] = heads[:, 0:end:2]
    ordered[:, end // 2 : end] = heads[:, 1:end:2]
    ordered[:, end:] = heads[:, end:]
    return ordered.view(rows.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """The `rope_parameters` of a config.json (or the older `rope_theta` and `rope_scaling`)."""

    kind: str
    theta: float
    parameters: Mapping[str, object]
    head_dim: int
    rotary_dim: int
    max_position_embeddings: int
    file: Path

    @classmethod
    def read(
        cls,
        config: Mapping[str, object],
        *,
        head_dim: int,
        max_positions: int,
        may_be_partial: bool,
        file: Path,
        ignored: Collection[str] = (),
    ) -> "RopeConfig":
        """`may_be_partial`: the family computes `partial_rotary_factor`."""
        section = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not isinstance(section, Mapping):
            raise CheckpointError(
                file=file, found=f"rope_parameters {section!r}", expected="an object"
            )
        parameters = dict(section)
        if "original_max_position_embeddings" in config:
            parameters["original_max_position_embeddings"] = config[
                "original_max_position_embeddings"
            ]
        parameters.setdefault("original_max_position_embeddings", max_positions)
        theta = parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        kind = "longrope" if kind == "su" else kind  # its name in early checkpoints
        share = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if kind not in _FREQUENCIES:
            raise CheckpointError(
                file=file, found=f"rope type {kind!r}", expected=f"one of {', '.join(_FREQUENCIES)}"
            )
        refuse_unread_rope_keys(section, kind=str(kind), file=file, ignored=ignored)
        return cls(
            kind=str(kind),
            theta=float(str(theta)),
            parameters=parameters,
            head_dim=head_dim,
            rotary_dim=_rotary_dim(share, head_dim, may_be_partial=may_be_partial, file=file),
            max_position_embeddings=max_positions,
            file=file,
        )

    def spec(self) -> RopeSpec:
        inverse_E, scaling = _FREQUENCIES[self.kind](self)
        return RopeSpec(
            kind=self.kind,
            inverse_frequencies=tuple(inverse_E.tolist()),
            attention_scaling=scaling,
            head_dim=self.head_dim,
        )

    def number(self, key: str, default: float | None = None) -> float:
        value = self.parameters.get(key)
        if value is None:
            value = default
        if not isinstance(value, int | float):
            raise CheckpointError(
                file=self.file,
                found=f"{key} {value!r} in the parameters of rope type {self.kind}",
                expected="a number",
            )
        return float(value)

    def factors(self, key: str) -> Tensor:
        """Returns one number for each rotated pair of channels."""
        factors, count = self.parameters.get(key), self.rotary_dim // 2
        if (
            not isinstance(factors, list)
            or len(factors) != count
            or not all(isinstance(factor, int | float) and factor > 0 for factor in factors)
        ):
            raise CheckpointError(
                file=self.file,
                found=f"{key} {reprlib.repr(factors)} in the parameters of rope type {self.kind}",
                expected=f"{count} positive numbers, one for each rotated pair of channels",
            )
        return torch.tensor(factors, dtype=torch.float32)

    def optional_number(self, key: str) -> float | None:
        return None if self.parameters.get(key) is None else self.number(key)

    @property
    def default_frequencies(self) -> Tensor:
        return 1.0 / (self.theta**self.exponents)

    @property
    def exponents(self) -> Tensor:
        return torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim


def _rotary_dim(share: object, head_dim: int, *, may_be_partial: bool, file: Path) -> int:
    if share in (None, 1.0):
        return head_dim
    expected = "1.0 (whole heads)"
    if may_be_partial:
        expected = f"a share from 0 to 1 that is an even number of the {head_dim} channels"
        if isinstance(share, int | float) and 0 < share < 1:
            rotary_dim = int(head_dim * share)
            if rotary_dim and rotary_dim % 2 == 0:
                return rotary_dim
    raise CheckpointError(file=file, found=f"partial_rotary_factor {share!r}", expected=expected)


def _default(config: RopeConfig) -> tuple[Tensor, float]:
    return config.default_frequencies, 1.0


def _linear(config: RopeConfig) -> tuple[Tensor, float]:
    return config.default_frequencies / config.number("factor"), 1.0


def _llama3(config: RopeConfig) -> tuple[Tensor, float]:
    """Stretches long waves, keeps short ones and blends those between (Llama 3.1)."""
    factor = config.number("factor")
    low, high = config.number("low_freq_factor"), config.number("high_freq_factor")
    trained_length = config.number("original_max_position_embeddings")
    inverse_E = config.default_frequencies
    wavelength_E = 2 * math.pi / inverse_E
    stretched_E = torch.where(wavelength_E > trained_length / low, inverse_E / factor, inverse_E)
    blend_E = (trained_length / wavelength_E - low) / (high - low)
    blended_E = (1 - blend_E) * stretched_E / factor + blend_E * stretched_E
    is_short_E = wavelength_E < trained_length / high
    is_long_E = wavelength_E > trained_length / low
    return torch.where(~is_short_E & ~is_long_E, blended_E, stretched_E), 1.0


def _yarn(config: RopeConfig) -> tuple[Tensor, float]:
    """Computes yarn (Peng et al., arXiv 2309.00071) with the optional keys as in transformers."""
    trained_length = config.number("original_max_position_embeddings")
    factor = config.number("factor", config.max_position_embeddings / trained_length)
    periods_E = config.theta**config.exponents
    low, high = _yarn_range(config, trained_length)
    ramp_E = (torch.arange(config.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)
    extrapolation_E = 1 - ramp_E.clamp(0, 1)
    inverse_E = (
        1.0 / (factor * periods_E) * (1 - extrapolation_E) + 1.0 / periods_E * extrapolation_E
    )
    return inverse_E, _yarn_scaling(config, factor)


def _yarn_range(config: RopeConfig, trained_length: float) -> tuple[float, float]:
    def channel(num_rotations: float) -> float:
        turns = trained_length / (num_rotations * 2 * math.pi)
        return config.rotary_dim * math.log(turns) / (2 * math.log(config.theta))

    low = channel(config.number("beta_fast", 32.0) or 32.0)
    high = channel(config.number("beta_slow", 1.0) or 1.0)
    if config.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    return (low, high + 0.001) if low == high else (low, high)


def _yarn_scaling(config: RopeConfig, factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention_factor = config.optional_number("attention_factor")
    if attention_factor is not None:
        return attention_factor
    mscale, mscale_all = config.optional_number("mscale"), config.optional_number("mscale_all_dim")
    return scale(mscale) / scale(mscale_all) if mscale and mscale_all else scale(1.0)


def _longrope(config: RopeConfig) -> tuple[Tensor, float]:
    """Divides each frequency by its factor for short texts (LongRoPE, arXiv 2402.13753)."""
    trained_length = config.number("original_max_position_embeddings")
    factor = config.number("factor", config.max_position_embeddings / trained_length)
    config.factors("long_factor")
    inverse_E = 1.0 / (config.factors("short_factor") * config.theta**config.exponents)
    scaling = config.optional_number("attention_factor")
    if scaling is None:
        growth = max(factor, 1.0)
        scaling = math.sqrt(1 + math.log(growth) / math.log(trained_length))
    return inverse_E, scaling


_FREQUENCIES: Mapping[str, Callable[[RopeConfig], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
