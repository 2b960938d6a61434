"""The engine as a library: token ids in, token ids out, in the caller's process.

`LocalEngine` runs the loop in the calling thread until the last request is done; `EngineThread`
runs it in a separate thread and delivers the results. Neither handles text.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from eesd_dist.config import EngineConfig
from eesd_dist.engine.build import build_local_engine
from eesd_dist.engine.core import EngineCore, StepResult
from eesd_dist.engine.masks import Masks
from eesd_dist.errors import EesdError, EngineError, RequestError
from eesd_dist.routing.beliefs import BeliefBook
from eesd_dist.text.grammars import GrammarCompiler
from eesd_dist.types import (
    Emission,
    FinishReason,
    Request,
    RequestId,
    RoundStats,
    TokenId,
    TokenLogprobs,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Generation:
    """All emissions of one request."""

    request_id: RequestId
    tokens: list[TokenId] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    drafted: list[int] = field(default_factory=list)
    """Draft length of each round."""
    accepted: list[int] = field(default_factory=list)

    def take(self, emission: Emission) -> None:
        self.tokens.extend(emission.tokens)
        self.logprobs.extend(emission.logprobs)
        self.drafted.append(emission.num_drafted)
        self.accepted.append(emission.num_accepted)
        self.finish_reason = emission.finish_reason


def with_all_cores(
    config: EngineConfig, *, environment: Mapping[str, str] = os.environ
) -> EngineConfig:
    """Returns the configuration of an engine that has this machine to itself. Unless it states
    `parallel.num_threads`, that is OMP_NUM_THREADS of the environment, or the number of cores. It
    changes no text."""
    if "num_threads" in config.parallel.model_fields_set:
        return config
    stated = environment.get("OMP_NUM_THREADS", "")
    if stated.isdecimal() and int(stated) > 0:
        num_threads = int(stated)
    else:
        allowed = len(os.sched_getaffinity(0))
        num_threads = min(allowed, psutil.cpu_count(logical=False) or allowed)
    parallel = config.parallel.model_copy(update={"num_threads": num_threads})
    return config.model_copy(update={"parallel": parallel})


class LocalEngine:
    """An engine with both stages in this process. Not thread-safe: use the service for that."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        grammars: GrammarCompiler | None = None,
        masks: Masks | None = None,
    ) -> None:
        """`grammars`: None compiles for the tokenizer of the checkpoint folder. `masks`: in place
        of those of `grammars`."""
        self._engine = build_local_engine(config, book=BeliefBook(), grammars=grammars, masks=masks)
        self._max_waiting = config.scheduler.max_waiting
        self._is_closed = False

    @property
    def engine(self) -> EngineCore:
        return self._engine

    def stream(
        self,
        requests: Sequence[Request],
        *,
        observe: Callable[[RoundStats], None] | None = None,
        on_refusal: Callable[[RequestId, RequestError], None] | None = None,
    ) -> Iterator[Emission]:
        """Yields the emissions of all requests, interleaved. Requests are added as the queue has
        room.

        `on_refusal` is called for a request that cannot be served; None raises its RequestError,
        and ends the others. Raises EngineError when the engine is closed.
        """
        self._check_open()
        pending = deque(requests)
        request_ids: list[RequestId] = []
        try:
            while pending or self._engine.has_work:
                while pending and self._engine.load().num_waiting < self._max_waiting:
                    self._add(pending[0], on_refusal)
                    request_ids.append(pending.popleft().request_id)
                result = self._engine.step(wait_s=0.0)
                if observe is not None:
                    for stats in result.rounds:
                        observe(stats)
                yield from result.emissions
                self._check_open()
        finally:  # a refused request or a closed iterator leaves no request behind
            if not self._is_closed:
                self._end(request_ids)

    def _add(
        self, request: Request, on_refusal: Callable[[RequestId, RequestError], None] | None
    ) -> None:
        try:
            self._engine.add(request)
        except RequestError as error:
            if on_refusal is None:
                raise
            on_refusal(request.request_id, error)

    def _end(self, request_ids: Sequence[RequestId]) -> None:
        for request_id in request_ids:
            self._engine.abort(request_id)
        while self._engine.has_work:
            self._engine.step(wait_s=0.0)

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed: make a new one")

    def generate(
        self,
        requests: Sequence[Request],
        *,
        observe: Callable[[RoundStats], None] | None = None,
    ) -> list[Generation]:
        """Runs every request to its end; returns them in the order given."""
        generations = {r.request_id: Generation(request_id=r.request_id) for r in requests}
        for emission in self.stream(requests, observe=observe):
            generations[emission.request_id].take(emission)
        return [generations[r.request_id] for r in requests]

    def abort(self, request_id: RequestId) -> None:
        """Ends a request, also while `stream` is being read."""
        self._engine.abort(request_id)

    def close(self) -> None:
        """Ends the engine, also while `stream` is being read. Closing twice changes nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._engine.close()


class EngineThread:
    """Runs an engine's loop in a separate thread until it is stopped or fails."""

    def __init__(
        self,
        engine: EngineCore,
        *,
        deliver: Callable[[StepResult], None],
        broken: Callable[[EesdError], None],
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._broken = broken
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, timeout_s: float = 5.0) -> None:
        self._stopping.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                result = self._engine.step()
                if result.rounds or result.emissions:
                    self._deliver(result)
        except EesdError as error:
            self._broken(error)
        except Exception as error:  # a bug: waiting requests have to be told
            logger.exception("engine loop broke")
            self._broken(EngineError(f"the engine broke: {type(error).__name__}: {error}"))
