"""Sends outcomes to the router and applies its plans, in a background task.

Outcomes of rounds are collected and sent at an interval. The round loop never waits for the router:
when it is slow or dead, messages that cannot be delivered are dropped and only its plans are
missing. At a longer interval it is asked for the pools too, so that a new request has a prior
before the router knows the request.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

from msgspec import structs

from eesd_dist.routing.beliefs import DraftPlan, Priors
from eesd_dist.types import Evidence, Outcome, Request, RequestId
from eesd_dist.workers.messages import Admission, RouterAdvice, RouterNews

logger = logging.getLogger(__name__)

_NO_EVIDENCE = Evidence(depth=0)
_MAX_QUEUED = 4096
"""Updates that are kept for a silent router; beyond it the oldest are dropped."""

T = TypeVar("T")
Plans = Mapping[RequestId, DraftPlan]


class RouterLink:
    def __init__(
        self,
        *,
        pipeline: str,
        ask: Callable[[RouterNews], Awaitable[RouterAdvice]],
        apply: Callable[[Plans], None],
        adopt: Callable[[Priors], None],
        interval_s: float = 0.05,
        timeout_s: float = 1.0,
        priors_interval_s: float = 1.0,
    ) -> None:
        self._pipeline = pipeline
        self._ask = ask
        self._apply = apply
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._adopt = adopt
        self._priors_interval_s = priors_interval_s
        self._priors_id = ""
        """Id of the pools received last; empty before the first."""
        self._request_s = -math.inf
        """Time when pools were last asked for."""
        self._admitted: deque[Admission] = deque(maxlen=_MAX_QUEUED)
        self._outcomes: deque[Outcome] = deque(maxlen=_MAX_QUEUED)
        self._finished: deque[RequestId] = deque(maxlen=_MAX_QUEUED)
        self._has_update = asyncio.Event()
        self._is_silent = False
        self._task: asyncio.Task[None] | None = None
        """None until `start` is called in an event loop."""

    def start(self) -> None:
        """Starts the background task, if it is not running."""
        if self._task is None:
            self._has_update.set()  # ask for the pools at once
            self._task = asyncio.get_running_loop().create_task(self._run())

    def admitted(self, request: Request) -> None:
        self._admitted.append(Admission(request.request_id, request.workload, request.caller))
        self._has_update.set()

    def observed(self, outcomes: Iterable[Outcome], finished: Iterable[RequestId]) -> None:
        self._outcomes.extend(_counts(outcome) for outcome in outcomes)
        self._finished.extend(finished)
        if self._outcomes or self._finished:
            self._has_update.set()

    async def _run(self) -> None:
        while True:
            await self._something_to_say()
            await asyncio.sleep(self._interval_s)
            await self._exchange()

    async def _something_to_say(self) -> None:
        """Waits for news, at most until the pools, which may have changed, are due again."""
        try:
            async with asyncio.timeout(self._priors_interval_s):
                await self._has_update.wait()
        except TimeoutError:
            return

    async def _exchange(self) -> None:
        self._has_update.clear()
        update = RouterNews(
            pipeline=self._pipeline,
            admitted=_drain(self._admitted),
            outcomes=_drain(self._outcomes),
            finished=_drain(self._finished),
            priors_id=self._due_priors_id(),
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                advice = await self._ask(update)
        except Exception as error:  # no failure of the router may reach the round loop
            if not self._is_silent:
                logger.warning("router does not answer, drafting continues: error=%r", error)
            self._is_silent = True
            self._request_s = -math.inf  # a restarted router may have other pools
            return
        if self._is_silent:
            logger.info("router answers again")
        self._is_silent = False
        try:
            self._apply(advice.plans)
            if advice.priors is not None:
                self._adopt(advice.priors)
                self._priors_id = advice.priors_id
        except Exception:  # a bug; later plans may be valid
            logger.exception("plans not applied: pipeline=%s", self._pipeline)

    def _due_priors_id(self) -> str | None:
        time_s = time.monotonic()
        if time_s - self._request_s < self._priors_interval_s:
            return None
        self._request_s = time_s
        return self._priors_id


def _counts(outcome: Outcome) -> Outcome:
    """Returns the outcome without evidence: beliefs do not use it, and it is most of the size."""
    branches = tuple(structs.replace(branch, evidence=_NO_EVIDENCE) for branch in outcome.branches)
    return structs.replace(outcome, evidence=(), branches=branches)


def _drain(queue: deque[T]) -> tuple[T, ...]:
    drained = tuple(queue)
    queue.clear()
    return drained
