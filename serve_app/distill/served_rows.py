"""The rows of texts that a running service generates: nothing of the target is loaded here.

Texts go to the drafting actors of the service's pipelines, over Ray like every operator's call, and
come back with their features. What a pipeline cannot answer now (it recovers, drains, or has no
room) is asked again, there or from another one: a text depends on its request alone.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import ray
from ray.exceptions import RayError

from eesd_dist.distill.sources.rows import TextRows
from eesd_dist.errors import CapacityError, ConfigError, EngineError, RequestError
from eesd_dist.model.weights import weights_digest
from eesd_dist.types import Request, RequestId
from serve_app.service.connect import our_error

logger = logging.getLogger(__name__)

_PER_PIPELINE = 64
"""Texts that a pipeline has at a time, at most; its engine batches as many as fit."""
_POLL_S = 0.5
_MAX_ATTEMPTS = 8
"""Failures of the engine during one text: more are not by chance."""
_PATIENCE_S = 900.0
"""Longest time in which no text ends: a pipeline of a large model takes minutes to load."""


class Pipelines(Protocol):
    """The pipelines of a running service."""

    def leaders(self) -> Sequence[Any]:
        """Returns the actors that take requests now."""
        ...


@dataclass(slots=True)
class _Batch:
    """The texts of one call."""

    waiting: deque[Request]
    flying: dict[Any, Request] = field(default_factory=dict)
    done: dict[RequestId, TextRows] = field(default_factory=dict)
    limit: int | None = None
    """Number of texts for which the service had room, once it had none for another."""
    failures: Counter[RequestId] = field(default_factory=Counter)
    """Number of failures of the engine under each text."""


class ServedRows:
    """A `RowSource` over the pipelines of a service."""

    def __init__(
        self, pipelines: Pipelines, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pipelines = pipelines
        self._clock = clock

    def require_target(self, model: Path) -> None:
        """Raises ConfigError if the service serves other weights than those of this folder."""
        digest = weights_digest(model)[:16]
        for leader in self._pipelines.leaders():
            weights = _answer(leader.kv_layout.remote()).weights
            if digest not in weights:
                raise ConfigError(
                    f"the service serves {weights}, other weights than {model} ({digest}): set "
                    "--model to a folder with the target that it serves"
                )

    def rows_of(self, requests: Sequence[Request]) -> list[TextRows]:
        """Returns the texts in order. Raises RequestError for one that the service cannot generate,
        EngineError when it generates none for a long time."""
        batch = _Batch(deque(requests))
        began_s = self._clock()
        trouble: Exception | None = None
        while batch.waiting or batch.flying:
            self._submit(batch)
            num_done = len(batch.done)
            trouble = self._receive(batch) or trouble
            if len(batch.done) > num_done:
                began_s = self._clock()
            elif self._clock() - began_s > _PATIENCE_S:
                raise EngineError(
                    f"the service has generated no text for {_PATIENCE_S:g} s: {trouble}"
                )
        return [batch.done[request.request_id] for request in requests]

    def _submit(self, batch: _Batch) -> None:
        leaders = self._pipelines.leaders() if batch.waiting else ()
        limit = _PER_PIPELINE * len(leaders)
        room = (limit if batch.limit is None else min(limit, batch.limit)) - len(batch.flying)
        for number in range(min(room, len(batch.waiting))):
            request = batch.waiting.popleft()
            # A new name for each attempt: an earlier one may still be leaving its engine.
            name = RequestId(f"{request.request_id}-{uuid4().hex[:8]}")
            leader = leaders[number % len(leaders)]
            text = leader.text_features.remote(replace(request, request_id=name))
            batch.flying[text] = request

    def _receive(self, batch: _Batch) -> Exception | None:
        """Takes the texts that have ended; returns why one has to be asked for again."""
        if not batch.flying:
            time.sleep(_POLL_S)
            return None
        ended, _ = ray.wait(list(batch.flying), num_returns=1, timeout=_POLL_S)
        trouble: Exception | None = None
        for text in ended:
            request = batch.flying.pop(text)
            try:
                batch.done[request.request_id] = TextRows.of(_answer(text))
            except RequestError:
                raise
            except (CapacityError, EngineError) as error:
                trouble = error
                if isinstance(error, CapacityError):
                    batch.limit = max(1, len(batch.flying))
                batch.failures[request.request_id] += isinstance(error, EngineError)
                if batch.failures[request.request_id] > _MAX_ATTEMPTS:
                    raise
                batch.waiting.append(request)
        if trouble is not None:
            logger.info("text asked for again: reason=%s", trouble)
            time.sleep(_POLL_S)
        return trouble


def _answer(call: Any) -> Any:
    try:
        return ray.get(call)
    except RayError as error:
        raise our_error(error) from error
