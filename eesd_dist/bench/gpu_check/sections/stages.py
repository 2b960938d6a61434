"""A checkpoint as two spans on one device, run in pieces as rounds run it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from eesd_dist.config import DType, Numerics
from eesd_dist.errors import ConfigError
from eesd_dist.model.attention.rows import RowPlan, RowSegment
from eesd_dist.model.span import LlamaSpan
from eesd_dist.model.spec import ModelSpec
from eesd_dist.page_table import PageTable
from eesd_dist.transport.group_handles import SingleGroup

PAGE_SIZE = 16


# Shapes: T tokens, D hidden channels, V vocabulary.
@dataclass(frozen=True, slots=True, kw_only=True)
class TwoSpans:
    """Layers [0, cut) and [cut, L), over pages that are not contiguous."""

    draft: LlamaSpan
    verify: LlamaSpan
    numerics: Numerics
    device: torch.device
    pages: tuple[int, ...]

    @classmethod
    def load(
        cls, folder: Path, *, dtype: DType, numerics: Numerics, device: torch.device, length: int
    ) -> Self:
        spec = ModelSpec.from_folder(folder)
        num_pages = -(-length // PAGE_SIZE)
        draft, verify = (
            LlamaSpan.load(
                folder,
                spec,
                first,
                last,
                group=SingleGroup(),
                dtype=dtype,
                numerics=numerics,
                device=device,
                num_pages=num_pages,
                page_size=PAGE_SIZE,
            )
            for first, last in ((0, 1), (1, spec.num_layers))
        )
        scattered = (*range(1, num_pages, 2), *range(0, num_pages, 2))
        return cls(draft=draft, verify=verify, numerics=numerics, device=device, pages=scattered)

    @classmethod
    def load_invariant(
        cls, folder: Path, *, dtype: DType, device: torch.device, length: int
    ) -> Self:
        """Loads with `numerics: invariant`, or `fast` if this machine refuses `invariant`."""
        try:
            return cls.load(folder, dtype=dtype, numerics="invariant", device=device, length=length)
        except ConfigError:
            return cls.load(folder, dtype=dtype, numerics="fast", device=device, length=length)

    @torch.inference_mode()
    def run(self, tokens_T: Tensor, pieces: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns hidden states between the spans [T, D] and logits [T, V], both on the CPU."""
        tokens_T = tokens_T.to(self.device)
        between, logits, start = [], [], 0
        for count in pieces:
            rows = RowPlan.build(
                [RowSegment(start, count, PageTable(self.pages))],
                page_size=PAGE_SIZE,
                device=self.device,
                numerics=self.numerics,
            )
            hidden_TD = self.draft.embed(tokens_T[start : start + count])
            hidden_TD = self.draft.forward(hidden_TD, rows)
            between.append(hidden_TD)
            logits.append(self.verify.logits(self.verify.forward(hidden_TD, rows)))
            start += count
        return torch.cat(between).float().cpu(), torch.cat(logits).cpu()
