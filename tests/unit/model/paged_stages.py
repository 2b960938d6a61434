"""A target divided into two stages, which are run as in rounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from eesd_dist.config import DType, Numerics
from eesd_dist.model.attention.rows import RowPlan, RowSegment
from eesd_dist.model.span import LlamaSpan
from eesd_dist.model.spec import ModelSpec
from eesd_dist.transport.contracts import TensorGroup
from eesd_dist.transport.group_handles import SingleGroup

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Layers [0, cut) and [cut, L) of one checkpoint."""

    draft: LlamaSpan
    verify: LlamaSpan
    page_size: int
    numerics: Numerics

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        cut: int = 1,
        group: TensorGroup | None = None,
        dtype: DType = "float32",
        numerics: Numerics = "invariant",
        device: torch.device = CPU,
        num_pages: int = 32,
        page_size: int = 16,
    ) -> Self:
        spec = ModelSpec.from_folder(folder)
        draft, verify = (
            LlamaSpan.load(
                folder,
                spec,
                first,
                last,
                group=group or SingleGroup(),
                dtype=dtype,
                numerics=numerics,
                device=device,
                num_pages=num_pages,
                page_size=page_size,
            )
            for first, last in ((0, cut), (cut, spec.num_layers))
        )
        return cls(draft=draft, verify=verify, page_size=page_size, numerics=numerics)

    @torch.inference_mode()
    def run(self, tokens_T: Tensor, segments: Sequence[RowSegment]) -> Tensor:
        """Returns the logits of the rows of all segments."""
        device, numerics = tokens_T.device, self.numerics
        rows = RowPlan.build(segments, page_size=self.page_size, device=device, numerics=numerics)
        hidden_TD = self.draft.forward(self.draft.embed(tokens_T), rows)
        return self.verify.logits(self.verify.forward(hidden_TD, rows))

    def run_in_chunks(
        self, tokens_T: Tensor, *, pages: Sequence[int], chunks: Sequence[int]
    ) -> Tensor:
        """Runs the tokens of one request, `chunks` rows at a time."""
        assert sum(chunks) == len(tokens_T)
        logits = []
        start = 0
        for count in chunks:
            segment = RowSegment(start, count, pages)
            logits.append(self.run(tokens_T[start : start + count], [segment]))
            start += count
        return torch.cat(logits)

    @torch.inference_mode()
    def run_without_pages(self, tokens_BL: Tensor) -> Tensor:
        hidden_BLD = self.draft.forward_full(self.draft.embed(tokens_BL))
        return self.verify.logits(self.verify.forward_full(hidden_BLD))
