"""The exit head: one decoder layer, a norm and an LM head that guess from early hidden states.

`ExitHead` is a head ready to draft, or one tensor-parallel rank's part of one, with its own keys
and values; `trainable_head` has the parameters. Both run the same layer. Neither decides how many
tokens to draft.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from eesd_dist.config import DType, KvCacheDType, Numerics
from eesd_dist.model.attention.pages import pages_on
from eesd_dist.model.attention.rows import RowPlan
from eesd_dist.model.heads.head_config import HeadConfig, HeadIdentity
from eesd_dist.model.heads.head_parts import HeadParts
from eesd_dist.model.heads.trainable_head import TrainableExitHead
from eesd_dist.model.kernels import (
    TORCH_DTYPES,
    LinearPacker,
)
from eesd_dist.model.layers.logits_head import LogitsHead
from eesd_dist.model.layers.norms import RmsNorm
from eesd_dist.model.layers.paged_layers import LoadedLayers, PagedLayers
from eesd_dist.model.parallel import joined_over_ranks
from eesd_dist.model.spec import ModelSpec
from eesd_dist.transport.contracts import TensorGroup
from eesd_dist.transport.group_handles import SingleGroup


# Shapes: T rows, D hidden channels, V draft vocabulary, W target vocabulary, B sequences, L length.
class ExitHead:
    """A head ready to draft, with its own pages, or one rank's part of such a head. Every rank of
    the group calls `forward` and `logits` with the same rows, and gets the same logits."""

    def __init__(
        self,
        *,
        exit_layer: int,
        vocab_ids: Tensor | None,
        vocab_size: int,
        layers: PagedLayers,
        logits_head: LogitsHead,
        group: TensorGroup,
        identity: HeadIdentity | None = None,
    ) -> None:
        self.exit_layer = exit_layer
        self.identity = identity
        """The files the ranks have to agree on; None for a group of one rank."""
        self.vocab_size = vocab_size
        """Size of the draft vocabulary."""
        self._group = group
        self.vocab_ids = vocab_ids
        """[V] target token of each draft index; None when the draft vocabulary is the target's."""
        self._layers = layers
        self._logits_head = logits_head

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        target: ModelSpec,
        target_path: Path,
        dtype: DType,
        numerics: Numerics,
        device: torch.device,
        num_pages: int,
        page_size: int,
        group: TensorGroup | None = None,
    ) -> "ExitHead":
        """Loads the weights and allocates the pages; raises the errors of `HeadWeights.load`."""
        weights = HeadWeights.load(
            folder,
            target=target,
            target_path=target_path,
            dtype=dtype,
            numerics=numerics,
            device=device,
            group=group,
        )
        return weights.head(num_pages=num_pages, page_size=page_size)

    @classmethod
    def ready(
        cls,
        head: TrainableExitHead,
        *,
        dtype: DType,
        numerics: Numerics,
        device: torch.device,
        num_pages: int,
        page_size: int,
    ) -> "ExitHead":
        """Packs a head's present weights for drafting; later training does not reach them."""
        parameters = HeadParts(
            config=head.config,
            layer=deepcopy(head.layer),
            norm_D=head.norm_D.detach().clone(),
            lm_head_VD=head.lm_head_VD.detach().clone(),
            vocab_ids_V=head.draft_tokens,
        )
        weights = HeadWeights.of(
            parameters,
            group=SingleGroup(),
            identity=None,
            dtype=dtype,
            numerics=numerics,
            device=device,
        )
        return weights.head(num_pages=num_pages, page_size=page_size)

    @property
    def paged(self) -> PagedLayers:
        """The head's layer with its pages, for copying pages."""
        return self._layers

    @property
    def logits_head(self) -> LogitsHead:
        """The norm and the LM head, or this rank's part of it."""
        return self._logits_head

    def take_pages(self, other: "ExitHead") -> None:
        """Replaces this head's empty keys and values by those of another head."""
        self._layers.take_pages(other._layers)

    def forward(self, hidden_TD: Tensor, rows: RowPlan) -> Tensor:
        """Computes the head's hidden states from those after `exit_layer` layers; writes its keys
        and values."""
        return self._layers.forward(hidden_TD, rows)

    def store_kv(self, hidden_TD: Tensor, rows: RowPlan) -> None:
        """Writes the head's keys and values of rows after which nothing is guessed: a small part of
        what `forward` computes."""
        self._layers.store_kv(hidden_TD, rows)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copies slots, (from, to) each; reads all sources before it writes any target."""
        self._layers.move(moves)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Returns draft logits [T, V] float32 of hidden states that `forward` returned."""
        local_TV = self._logits_head(hidden_TD)
        return joined_over_ranks(local_TV, self._group, count=self.vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadWeights:
    """A head, or one rank's part of it, in memory and packed, without pages."""

    config: HeadConfig
    vocab_ids_V: Tensor
    layers: LoadedLayers
    logits_head: LogitsHead
    group: TensorGroup
    identity: HeadIdentity | None

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        target: ModelSpec,
        target_path: Path,
        dtype: DType,
        numerics: Numerics,
        device: torch.device,
        kv_cache_dtype: KvCacheDType = "auto",
        group: TensorGroup | None = None,
    ) -> Self:
        """Reads this rank's part of a head; without a group, the whole head.

        Raises CheckpointError for a head that is damaged or does not fit the target, ConfigError
        for one that the group's ranks cannot share.
        """
        folder, group = Path(folder), group or SingleGroup()
        parameters = HeadParts.read(
            folder,
            target=target,
            target_path=Path(target_path),
            dtype=TORCH_DTYPES[dtype],
            rank=group.rank,
            size=group.size,
        )
        return cls.of(
            parameters,
            group=group,
            identity=HeadIdentity.of(folder) if group.size > 1 else None,
            dtype=dtype,
            numerics=numerics,
            device=device,
            kv_cache_dtype=kv_cache_dtype,
        )

    @classmethod
    def of(
        cls,
        parameters: HeadParts,
        *,
        group: TensorGroup,
        identity: HeadIdentity | None,
        dtype: DType,
        numerics: Numerics,
        device: torch.device,
        kv_cache_dtype: KvCacheDType = "auto",
    ) -> Self:
        """Packs the parts of a head."""
        packer = LinearPacker(dtype=dtype, numerics=numerics, device=device)
        config, spec = parameters.config, parameters.config.layer
        weights = parameters.layer.requires_grad_(False).to(device, packer.weight_dtype)
        norm_D = parameters.norm_D.to(device, packer.weight_dtype)
        norm = RmsNorm.before_logits(norm_D, spec, dtype=packer.compute_dtype)
        layers = LoadedLayers.of(
            [weights.layer(packer.pack, group, dtype=packer.compute_dtype)],
            first=0,
            spec=spec,
            num_ranks=group.size,
            dtype=packer.compute_dtype,
            kv_dtype=pages_on(device).kv_dtype(kv_cache_dtype, compute_dtype=packer.compute_dtype),
            device=device,
        )
        logits_head = LogitsHead(
            norm,
            packer.pack(parameters.lm_head_VD),
            softcap=spec.traits.logit_softcap,
            packer=packer,
            numerics=numerics,
        )
        packer.report(f"exit_head after_layer={config.exit_layer}")
        return cls(
            config=config,
            vocab_ids_V=parameters.vocab_ids_V.to(device),
            layers=layers,
            logits_head=logits_head,
            group=group,
            identity=identity,
        )

    def head(self, *, num_pages: int, page_size: int) -> ExitHead:
        """Allocates the pages. Raises ConfigError as `LoadedLayers.with_pages`."""
        return ExitHead(
            exit_layer=self.config.exit_layer,
            vocab_ids=self.vocab_ids_V if self.config.kind == "truncated" else None,
            vocab_size=self.config.draft_vocab_size,
            layers=self.layers.with_pages(num_pages=num_pages, page_size=page_size),
            logits_head=self.logits_head,
            group=self.group,
            identity=self.identity,
        )
