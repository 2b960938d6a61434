"""Carries outcomes to the router and its plans back, and lets nobody wait for either.

It gathers what rounds have taught, sends it every so often and hands the answer on. A router that
is slow, dead or gone costs nothing but its advice: news that cannot be delivered are dropped.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

from eesd_dist.actors.contracts import RouterNews
from eesd_dist.routing.beliefs import DraftPlan
from eesd_dist.types import Outcome, RequestId

logger = logging.getLogger(__name__)

T = TypeVar("T")
Plans = Mapping[RequestId, DraftPlan]


class RouterLink:
    def __init__(
        self,
        *,
        pipeline: str,
        ask: Callable[[RouterNews], Awaitable[Plans]],
        apply: Callable[[Plans], None],
        interval_s: float = 0.05,
        timeout_s: float = 1.0,
        max_kept: int = 4096,
    ) -> None:
        self._pipeline = pipeline
        self._ask = ask
        self._apply = apply
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._admitted: deque[tuple[RequestId, str]] = deque(maxlen=max_kept)
        self._outcomes: deque[Outcome] = deque(maxlen=max_kept)
        self._finished: deque[RequestId] = deque(maxlen=max_kept)
        self._news = asyncio.Event()
        self._is_silent = False
        self._task: asyncio.Task[None] | None = None
        """None until there is an event loop to run in."""

    def start(self) -> None:
        """Starts carrying; a second call changes nothing."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def admitted(self, request_id: RequestId, workload: str) -> None:
        self._admitted.append((request_id, workload))
        self._news.set()

    def observed(self, outcomes: Iterable[Outcome], finished: Iterable[RequestId]) -> None:
        self._outcomes.extend(outcomes)
        self._finished.extend(finished)
        if self._outcomes or self._finished:
            self._news.set()

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            await asyncio.sleep(self._interval_s)
            await self._exchange()

    async def _exchange(self) -> None:
        self._news.clear()
        news = RouterNews(
            pipeline=self._pipeline,
            admitted=_drain(self._admitted),
            outcomes=_drain(self._outcomes),
            finished=_drain(self._finished),
        )
        try:
            plans = await asyncio.wait_for(self._ask(news), self._timeout_s)
        except Exception as error:  # whatever befalls the router must not reach the rounds
            if not self._is_silent:
                logger.warning("router is silent, drafting goes on alone: error=%r", error)
            self._is_silent = True
            return
        if self._is_silent:
            logger.info("router answers again")
        self._is_silent = False
        try:
            self._apply(plans)
        except Exception:  # a bug; the plans to come may be better ones
            logger.exception("plans not applied: pipeline=%s", self._pipeline)


def _drain(queue: deque[T]) -> tuple[T, ...]:
    taken = tuple(queue)
    queue.clear()
    return taken
