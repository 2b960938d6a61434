"""Sources of the rows of texts: a target in this process, or the stages of a running service.

Every step that needs the target asks a `RowSource`: for texts that the target writes, or for texts
read unchanged, each with the features of its rows. What follows depends on rows alone, and is the
same code wherever the target runs. `serve_app.distill.jobs` asks a service.
"""

# Shapes: T rows of a text, D hidden size, K best tokens.

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eesd_dist.engine.core import EngineCore
from eesd_dist.engine.recording.text_features import TextFeatures
from eesd_dist.errors import CapacityError
from eesd_dist.types import (
    FeatureSpec,
    Request,
    RequestId,
    SamplingParams,
    SpeculationParams,
    TokenId,
)

PLAIN = SpeculationParams(mode="off")
"""Texts with features are written without drafts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextRows:
    """A text, and its features: row t is about the token after token t. Nothing was computed after
    the last token, which has no row."""

    tokens: tuple[int, ...]
    """T + 1 tokens."""
    hidden: dict[int, Tensor]
    """Exit layer -> [T, D] as they were computed; a store rounds them to bfloat16."""
    top_ids_TK: Tensor
    """int32, the best first."""
    top_logits_TK: Tensor
    lse_T: Tensor

    @classmethod
    def of(cls, text: TextFeatures) -> "TextRows":
        return cls(
            tokens=text.tokens,
            hidden=text.hidden,
            # Copies: what another process has sent must not be written to.
            top_ids_TK=torch.tensor(text.top_ids_TK),
            top_logits_TK=torch.tensor(text.top_logits_TK),
            lse_T=torch.tensor(text.lse_T),
        )

    @property
    def num_rows(self) -> int:
        return int(self.lse_T.shape[0])


class RowSource(Protocol):
    """A target that writes and reads texts."""

    def rows_of(self, requests: Sequence[Request]) -> list[TextRows]:
        """Returns the text of each request, in their order. Each request wants features, and no
        drafts."""
        ...


def reading(text: Sequence[int], *, name: str, spec: FeatureSpec) -> Request:
    """Returns a request for the rows of a given text. The token that it generates, after the last
    row, is not part of the text."""
    return Request(
        request_id=RequestId(name),
        prompt=tuple(TokenId(token) for token in text),
        sampling=SamplingParams(temperature=0.0, max_tokens=1),
        speculation=PLAIN,
        features=spec,
    )


class EngineRows:
    """The rows of an engine in this process."""

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine

    def rows_of(self, requests: Sequence[Request]) -> list[TextRows]:
        waiting = deque(requests)
        texts: dict[RequestId, TextRows] = {}
        while waiting or self._engine.has_work:
            self._add(waiting)
            for text in self._engine.step(wait_s=0.0).features:
                texts[text.request_id] = TextRows.of(text)
        return [texts[request.request_id] for request in requests]

    def _add(self, waiting: deque[Request]) -> None:
        """Adds as many requests as there is room for."""
        while waiting:
            try:
                self._engine.add(waiting[0])
            except CapacityError:
                if not self._engine.has_work:
                    raise
                return
            waiting.popleft()
