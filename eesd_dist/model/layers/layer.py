"""Decoder layer: the only copy of the forward pass, for serving and for training.

`LayerWeights` are the parameters, in an order that computes fast; `DecoderLayer` is the layer ready
to run, made from them with the products that the caller packs them into. Attention and positions
are passed in: the layer does not depend on pages or sequences.

Order of the fused rows: query heads as (query within group, KV head), then keys, then values; the
two channels that a rotation mixes are adjacent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from eesd_dist.model.elementwise import Activation, row_blocks
from eesd_dist.model.kernels import Linear, Pack
from eesd_dist.model.layers.norms import HeadNorm, JointNorm, RmsNorm
from eesd_dist.model.parallel import Shard, summed_over_ranks
from eesd_dist.model.rope import interleave_pairs, separate_pairs
from eesd_dist.model.spec import ModelSpec
from eesd_dist.model.weights import TensorSource
from eesd_dist.transport.contracts import TensorGroup

# Shapes: T rows, D hidden channels, I intermediate channels, H heads of all kinds, K KV heads,
# G queries per KV head, E channels of a head, O rows of a fused weight, P pairs of channels.
Attend = Callable[[Tensor], Tensor]
"""heads_THE -> mixed_TD: stores the keys and values, and attends the queries to their keys."""

AfterLayer = Callable[[int, Tensor], None]
"""The number of layers done and the rows [T, D] after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """Part that is added to a row: a product summed over ranks, then normed and scaled."""

    product: Linear
    group: TensorGroup
    norm: RmsNorm | None
    scale: float
    """Factor of the sum. A norm has it in its weight."""

    def __call__(self, x_TI: Tensor) -> Tensor:
        total_TD = summed_over_ranks(self.product(x_TI), self.group)
        if self.norm is not None:
            return self.norm(total_TD)
        return total_TD if self.scale == 1.0 else total_TD * self.scale


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """down(activation(gate) * up); gate and up are one product."""

    gate_up: Linear
    activation: Activation
    down: Added

    def __call__(self, x_TD: Tensor) -> Tensor:
        gate_TI, up_TI = self.gate_up(x_TD).chunk(2, dim=-1)
        return self.down(self.activation(gate_TI).mul_(up_TI))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """A layer ready to run."""

    attention_norm: RmsNorm | None
    qkv: Linear
    head_norm: HeadNorm | JointNorm | None
    output: Added
    mlp_norm: RmsNorm | None
    mlp: GatedMlp
    num_kv_heads: int
    queries_per_kv: int
    head_dim: int

    def forward(self, x_TD: Tensor, rotation_T1P: Tensor, attend: Attend) -> Tensor:
        input_TD = x_TD if self.attention_norm is None else self.attention_norm(x_TD)
        heads_THE = self.qkv(input_TD).view(x_TD.shape[0], -1, self.head_dim)
        if self.head_norm is None and heads_THE.dtype == torch.float32:
            self._rotate_in_place(heads_THE, rotation_T1P)
        else:
            heads_THE = self._rotated(heads_THE, rotation_T1P)
        x_TD = x_TD + self.output(attend(heads_THE))
        return x_TD + self.mlp(x_TD if self.mlp_norm is None else self.mlp_norm(x_TD))

    def _rotate_in_place(self, heads_THE: Tensor, rotation_T1P: Tensor) -> None:
        """Rotates queries and keys by their positions, in place: nothing else uses the product."""
        num_rows, num_heads, head_dim = heads_THE.shape
        pairs_THP = torch.view_as_complex(heads_THE.view(num_rows, num_heads, head_dim // 2, 2))
        turned_THP = pairs_THP.narrow(1, 0, num_heads - self.num_kv_heads)
        for rows in row_blocks(turned_THP):
            turned_THP[rows].mul_(rotation_T1P[rows])

    def _rotated(self, heads_THE: Tensor, rotation_T1P: Tensor) -> Tensor:
        num_rows, num_heads, head_dim = heads_THE.shape
        num_turned = num_heads - self.num_kv_heads
        turned_THE = heads_THE.narrow(1, 0, num_turned)
        values_THE = heads_THE.narrow(1, num_turned, self.num_kv_heads)
        if self.head_norm is not None:
            turned_THE = self.head_norm(turned_THE)
        paired = turned_THE.to(torch.float32, copy=True).reshape(num_rows, -1, head_dim // 2, 2)
        pairs_THP = torch.view_as_complex(paired)
        for rows in row_blocks(pairs_THP):
            pairs_THP[rows].mul_(rotation_T1P[rows])
        turned_THE = torch.view_as_real(pairs_THP).flatten(2).to(heads_THE.dtype)
        return torch.cat([turned_THE, values_THE], dim=1)


class LayerWeights(nn.Module):
    """Part of a layer's parameters that a rank has."""

    def __init__(self, spec: ModelSpec, shard: Shard, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self._spec = spec
        self._num_kv = len(shard.kv_heads)
        self._queries_per_kv = shard.queries_per_kv
        self.parts = nn.ParameterDict(tensors)

    @classmethod
    def read(
        cls, source: TensorSource, prefix: str, spec: ModelSpec, shard: Shard, dtype: torch.dtype
    ) -> Self:
        """Reads this shard's slices of the tensors below `prefix` of a checkpoint."""
        reader = _LayerReader(source, prefix, spec, shard, dtype)
        return cls(spec, shard, reader.tensors())

    def layer(self, pack: Pack, group: TensorGroup, *, dtype: torch.dtype) -> DecoderLayer:
        """Builds the layer from the products that `pack` makes of these weights."""
        parameters, traits = self.parts, self._spec.traits

        def packed(name: str) -> Linear:
            bias = parameters.get(f"{name}_bias")
            return pack(parameters[f"{name}_weight"], bias)

        def normed(name: str, *, scale: float = 1.0) -> RmsNorm | None:
            if name not in parameters:
                return None
            return RmsNorm.of(parameters[name], self._spec, dtype=dtype, scale=scale)

        def added(name: str, norm: str) -> Added:
            scale = traits.residual_scale
            return Added(
                product=packed(name),
                group=group,
                norm=normed(norm, scale=scale),
                scale=scale,
            )

        return DecoderLayer(
            attention_norm=normed("attention_norm"),
            qkv=packed("qkv"),
            head_norm=self._head_norm(dtype),
            output=added("output", "attention_post_norm"),
            mlp_norm=normed("mlp_norm"),
            mlp=GatedMlp(
                gate_up=packed("gate_up"),
                activation=traits.activation,
                down=added("down", "mlp_post_norm"),
            ),
            num_kv_heads=self._num_kv,
            queries_per_kv=self._queries_per_kv,
            head_dim=self._spec.head_dim,
        )

    def _head_norm(self, dtype: torch.dtype) -> HeadNorm | JointNorm | None:
        if "q_norm" not in self.parts:
            return None
        traits, q_norm, k_norm = self._spec.traits, self.parts["q_norm"], self.parts["k_norm"]
        eps, offset = self._spec.rms_norm_eps, traits.norms.weight_offset
        num_queries = self._queries_per_kv * self._num_kv
        if traits.joint_qk_norm:
            weight_HE = torch.cat([q_norm, k_norm]).view(-1, self._spec.head_dim)
            return JointNorm(
                weight_HE, num_queries=num_queries, eps=eps, dtype=dtype, offset=offset
            )
        weight_HE = torch.cat([q_norm.expand(num_queries, -1), k_norm.expand(self._num_kv, -1)])
        return HeadNorm(weight_HE, eps=eps, dtype=dtype, offset=offset)

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor]:
        """Returns these parameters with the names and the order of a Hugging Face checkpoint."""
        tensors: dict[str, Tensor] = {}
        for kind in ("weight", "bias"):
            tensors |= self._attention_tensors(kind)
            for fused, names in (("gate_up", ("gate_proj", "up_proj")), ("down", ("down_proj",))):
                if f"{fused}_{kind}" in self.parts:
                    matrices = self.parts[f"{fused}_{kind}"].chunk(len(names))
                    tensors |= {
                        f"mlp.{name}.{kind}": matrix
                        for name, matrix in zip(names, matrices, strict=True)
                    }
        if self._spec.traits.fused_projections:
            tensors = _fused(tensors)
        for parameter, name in self._spec.traits.norms.names().items():
            tensors[f"{name}.weight"] = self.parts[parameter]
        for name in ("q_norm", "k_norm"):
            if name in self.parts:
                weight = separate_pairs(self.parts[name], self._spec.ropes[0])
                if name == "q_norm" and self._spec.traits.joint_qk_norm:
                    dim, num_kv, per_kv = self._spec.head_dim, self._num_kv, self._queries_per_kv
                    weight = _swap_heads(weight, per_kv, num_kv, dim)
                tensors[f"self_attn.{name}.weight"] = weight
        return {prefix + name: tensor.detach().contiguous() for name, tensor in tensors.items()}

    def _attention_tensors(self, kind: str) -> dict[str, Tensor]:
        dim, num_kv, per_kv = self._spec.head_dim, self._num_kv, self._queries_per_kv
        tensors = {}
        if f"qkv_{kind}" in self.parts:
            sizes = [per_kv * num_kv * dim, num_kv * dim, num_kv * dim]
            q, k, v = self.parts[f"qkv_{kind}"].split(sizes)
            q = separate_pairs(q, self._spec.ropes[0])
            tensors["self_attn.q_proj"] = _swap_heads(q, per_kv, num_kv, dim)
            tensors["self_attn.k_proj"] = separate_pairs(k, self._spec.ropes[0])
            tensors["self_attn.v_proj"] = v
        if kind == "weight":
            columns = self.parts["output_weight"].t()
            tensors["self_attn.o_proj"] = _swap_heads(columns, per_kv, num_kv, dim).t()
        elif "output_bias" in self.parts:
            tensors["self_attn.o_proj"] = self.parts["output_bias"]
        return {f"{name}.{kind}": tensor for name, tensor in tensors.items()}


_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def _fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors with one matrix where a checkpoint has the rows of several together."""
    fused = dict(tensors)
    for name, projections in _FUSED.items():
        for kind in ("weight", "bias"):
            if f"{projections[0]}.{kind}" in fused:
                rows = [fused.pop(f"{projection}.{kind}") for projection in projections]
                fused[f"{name}.{kind}"] = torch.cat(rows)
    return fused


def _swap_heads(rows: Tensor, outer: int, inner: int, head_dim: int) -> Tensor:
    """Exchanges the two head axes of rows [outer * inner * head_dim, ...]."""
    split = rows.reshape(outer, inner, head_dim, *rows.shape[1:])
    return split.transpose(0, 1).reshape(rows.shape)


@dataclass(frozen=True, slots=True)
class _LayerReader:
    """Reads one layer's slices and puts them into the fused order."""

    source: TensorSource
    prefix: str
    spec: ModelSpec
    shard: Shard
    dtype: torch.dtype

    def tensors(self) -> dict[str, Tensor]:
        spec, dim, traits = self.spec, self.spec.head_dim, self.spec.traits
        hidden = (spec.hidden_size,)
        tensors = {
            parameter: self._vector(f"{name}.weight", spec.hidden_size)
            for parameter, name in traits.norms.names().items()
        }
        tensors |= {
            "qkv_weight": self._qkv("weight", hidden),
            "output_weight": self._output_weight(),
            "gate_up_weight": self._gate_up("weight", hidden),
            "down_weight": self._read(
                "mlp.down_proj.weight",
                (spec.hidden_size, spec.intermediate_size),
                columns=self.shard.channels,
            ),
        }
        if traits.qkv_bias:
            tensors["qkv_bias"] = self._qkv("bias", ())
        if traits.mlp_bias:
            tensors["gate_up_bias"] = self._gate_up("bias", ())
        if traits.output_bias and self.shard.adds_bias:
            tensors["output_bias"] = self._vector("self_attn.o_proj.bias", spec.hidden_size)
        if traits.mlp_bias and self.shard.adds_bias:
            tensors["down_bias"] = self._vector("mlp.down_proj.bias", spec.hidden_size)
        if traits.qk_norm:
            counts = (spec.num_heads, spec.num_kv_heads) if traits.joint_qk_norm else (1, 1)
            for name, count in zip(("q_norm", "k_norm"), counts, strict=True):
                weight = self._vector(f"self_attn.{name}.weight", count * dim)
                tensors[name] = interleave_pairs(weight, spec.ropes[0])
        if traits.joint_qk_norm:
            tensors["q_norm"] = _swap_heads(
                tensors["q_norm"], spec.num_kv_heads, spec.queries_per_kv, dim
            )
        return tensors

    def _qkv(self, kind: str, inner: tuple[int, ...]) -> Tensor:
        q = interleave_pairs(self._heads("q", kind, inner), self.spec.ropes[0])
        q = _swap_heads(q, len(self.shard.kv_heads), self.shard.queries_per_kv, self.spec.head_dim)
        k = interleave_pairs(self._heads("k", kind, inner), self.spec.ropes[0])
        return _rows_of([q, k, self._heads("v", kind, inner)])

    def _heads(self, letter: str, kind: str, inner: tuple[int, ...]) -> Tensor:
        spec, dim = self.spec, self.spec.head_dim
        count = spec.num_heads if letter == "q" else spec.num_kv_heads
        heads = self.shard.heads if letter == "q" else self.shard.kv_heads
        name, num_heads, first = letter, count, 0
        if spec.traits.fused_projections:
            before = {"q": 0, "k": spec.num_heads, "v": spec.num_heads + spec.num_kv_heads}
            name, first = "qkv", before[letter]
            num_heads = spec.num_heads + 2 * spec.num_kv_heads
        return self._read(
            f"self_attn.{name}_proj.{kind}",
            (num_heads * dim, *inner),
            rows=range((first + heads.start) * dim, (first + heads.stop) * dim),
            own=False,
        )

    def _output_weight(self) -> Tensor:
        spec, dim, heads = self.spec, self.spec.head_dim, self.shard.heads
        weight_DO = self._read(
            "self_attn.o_proj.weight",
            (spec.hidden_size, spec.num_heads * dim),
            columns=range(heads.start * dim, heads.stop * dim),
        )
        num_kv = len(self.shard.kv_heads)
        return _swap_heads(weight_DO.t(), num_kv, self.shard.queries_per_kv, dim).t().contiguous()

    def _gate_up(self, kind: str, inner: tuple[int, ...]) -> Tensor:
        size, own = self.spec.intermediate_size, self.shard.channels
        if self.spec.traits.fused_projections:
            name, shape = f"mlp.gate_up_proj.{kind}", (2 * size, *inner)
            runs = [
                (name, shape, range(size * at + own.start, size * at + own.stop)) for at in (0, 1)
            ]
        else:
            runs = [(f"mlp.{name}_proj.{kind}", (size, *inner), own) for name in ("gate", "up")]
        return _rows_of(
            [self._read(name, shape, rows=rows, own=False) for name, shape, rows in runs]
        )

    def _vector(self, name: str, size: int) -> Tensor:
        return self._read(name, (size,))

    def _read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: range | None = None,
        columns: range | None = None,
        own: bool = True,
    ) -> Tensor:
        return self.source.read(
            self.prefix + name, shape=shape, rows=rows, columns=columns, dtype=self.dtype, own=own
        )


def _rows_of(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the parts one below the other, in memory of its own.

    `torch.cat` does the same, but for tensors on `meta`, of which sizes are counted, it imports
    torch._dynamo: 1.2 s of CPU and 820 modules in every worker.
    """
    stacked = tensors[0].new_empty(sum(len(tensor) for tensor in tensors), *tensors[0].shape[1:])
    rows = 0
    for tensor in tensors:
        stacked[rows : rows + len(tensor)] = tensor
        rows += len(tensor)
    return stacked
