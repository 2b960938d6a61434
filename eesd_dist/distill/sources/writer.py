"""Writers: generate a target's text for requests, with the outcome of every round."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

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
from eesd_dist.types import Outcome, Request, TokenId

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
        self.cost = engine.cost

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
