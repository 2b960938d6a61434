"""Sources of the rows of texts: a target in this process, or the stages of a running service.

Every step that needs the target asks a `RowSource`: for texts that the target writes, or for texts
read unchanged, each with the features of its rows. What follows depends on rows alone, and is the
same code wherever the target runs. `serve_app.distill.jobs` asks a service. A `Writer` answers
requests completely, with the outcome of every round.
"""

# Shapes: T rows of a text, D hidden size, K best tokens.

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from eesd_dist.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from eesd_dist.control.cost import CostModel
from eesd_dist.engine.core import EngineCore
from eesd_dist.engine.recording.text_features import TextFeatures
from eesd_dist.errors import CapacityError
from eesd_dist.types import (
    FeatureSpec,
    Outcome,
    Request,
    RequestId,
    SamplingParams,
    SpeculationParams,
    TokenId,
)

# Shapes: T rows of a text, D hidden size, K best tokens.


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


_PAGE_SIZE = 32


@dataclass(slots=True, kw_only=True)
class Written:
    """A text, with the outcomes of its rounds in order."""

    tokens: list[TokenId] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)


class Writer(Protocol):
    """A target, with or without a head, that answers requests completely."""

    @property
    def cost(self) -> CostModel | None:
        """Measured cost of a round; None without drafts."""

    def write(self, requests: Sequence[Request]) -> Sequence[Written]:
        """Answers all requests together; returns texts in the order of the requests."""


class EngineWriter:
    """Writer with an engine in this process."""

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        self.cost = engine.learnt_cost

    def write(self, requests: Sequence[Request]) -> list[Written]:
        written = {request.request_id: Written() for request in requests}
        for request in requests:
            self._engine.add(request)
        while self._engine.has_work:
            result = self._engine.step(wait_s=0.0)
            for outcome in result.outcomes:
                written[outcome.request_id].outcomes.append(outcome)
            for emission in result.emissions:
                written[emission.request_id].tokens.extend(emission.tokens)
        return list(written.values())


def engine_config(
    model: ModelConfig,
    speculation: SpeculationConfig,
    *,
    batch: int,
    max_length: int,
    threads: int,
) -> EngineConfig:
    """Returns the config of an engine with pages for `batch` requests of `max_length` tokens."""
    pages_per_request = -(-(max_length + speculation.max_draft_tokens) // _PAGE_SIZE) + 1
    return EngineConfig(
        model=model,
        cache=CacheConfig(
            page_size=_PAGE_SIZE, num_pages=batch * pages_per_request, prefix_caching=False
        ),
        scheduler=SchedulerConfig(max_running=batch, max_waiting=batch),
        speculation=speculation,
        parallel=ParallelConfig(num_threads=threads),
    )
