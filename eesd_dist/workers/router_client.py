"""Carries outcomes to the router and its plans back, and lets nobody wait for either.

It gathers what rounds have taught, sends it every so often and hands the answer on. A router that
is slow, dead or gone costs nothing but its advice: news that cannot be delivered are dropped. Now
and then it asks for the pools as well, so that a new request is warm before the router has heard
of it.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from eesd_dist.routing.beliefs import DraftPlan, Priors
from eesd_dist.types import Evidence, Outcome, RequestId
from eesd_dist.workers.messages import RouterAdvice, RouterNews

logger = logging.getLogger(__name__)

_NO_EVIDENCE = Evidence(depth=0, top1_prob=1.0, top2_margin=1.0, entropy=0.0)

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
        priors_every_s: float = 1.0,
        max_kept: int = 4096,
    ) -> None:
        self._pipeline = pipeline
        self._ask = ask
        self._apply = apply
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._adopt = adopt
        self._priors_every_s = priors_every_s
        self._priors_id = ""
        """Which pools are here; none at first."""
        self._asked_s = -math.inf
        """When they were asked for last."""
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
            self._news.set()  # the first thing to ask for is what others have learnt
            self._task = asyncio.get_running_loop().create_task(self._run())

    def admitted(self, request_id: RequestId, workload: str) -> None:
        self._admitted.append((request_id, workload))
        self._news.set()

    def observed(self, outcomes: Iterable[Outcome], finished: Iterable[RequestId]) -> None:
        self._outcomes.extend(_counts(outcome) for outcome in outcomes)
        self._finished.extend(finished)
        if self._outcomes or self._finished:
            self._news.set()

    async def _run(self) -> None:
        while True:
            await self._something_to_say()
            await asyncio.sleep(self._interval_s)
            await self._exchange()

    async def _something_to_say(self) -> None:
        """News, or nothing for so long that somebody may have pinned or loaded other pools."""
        try:
            async with asyncio.timeout(self._priors_every_s):
                await self._news.wait()
        except TimeoutError:
            return

    async def _exchange(self) -> None:
        self._news.clear()
        news = RouterNews(
            pipeline=self._pipeline,
            admitted=_drain(self._admitted),
            outcomes=_drain(self._outcomes),
            finished=_drain(self._finished),
            known_priors=self._known_priors(),
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                advice = await self._ask(news)
        except Exception as error:  # whatever befalls the router must not reach the rounds
            if not self._is_silent:
                logger.warning("router is silent, drafting goes on alone: error=%r", error)
            self._is_silent = True
            self._asked_s = -math.inf  # whoever answers next may know other pools
            return
        if self._is_silent:
            logger.info("router answers again")
        self._is_silent = False
        try:
            self._apply(advice.plans)
            if advice.priors is not None:
                self._adopt(advice.priors)
                self._priors_id = advice.priors_id
        except Exception:  # a bug; the plans to come may be better ones
            logger.exception("plans not applied: pipeline=%s", self._pipeline)

    def _known_priors(self) -> str | None:
        now_s = time.monotonic()
        if now_s - self._asked_s < self._priors_every_s:
            return None
        self._asked_s = now_s
        return self._priors_id


def _counts(outcome: Outcome) -> Outcome:
    """Without the evidence: beliefs are made of counts, and it is most of the message."""
    branches = tuple(replace(branch, evidence=_NO_EVIDENCE) for branch in outcome.branches)
    return replace(outcome, evidence=(), branches=branches)


def _drain(queue: deque[T]) -> tuple[T, ...]:
    taken = tuple(queue)
    queue.clear()
    return taken
