"""Outcomes are sent and plans are received, without waiting for the router."""

import asyncio
from collections.abc import Callable

from msgspec import structs

from eesd_dist.control.belief import Belief
from eesd_dist.routing.beliefs import DraftPlan, Priors
from eesd_dist.types import Evidence, Outcome, Request, RequestId, SamplingParams
from eesd_dist.workers.messages import Admission, RouterAdvice, RouterNews
from eesd_dist.workers.router_client import Plans, RouterLink

RARELY_S = 60.0

R = RequestId("r")
REQUEST = Request(request_id=R, prompt=(), sampling=SamplingParams(), workload="chat", caller="c")
PLAN = DraftPlan(request_id=R, belief=Belief())
PRIORS = Priors(pools={"chat": Belief(alpha=9.0)}, is_pinned=False)


class Router:
    def __init__(self, *, answers: bool = True) -> None:
        self.answers = answers
        self.heard: list[RouterNews] = []
        self.applied: list[Plans] = []
        self.adopted: list[Priors] = []
        self.priors_id = "1"

    async def ask(self, update: RouterNews) -> RouterAdvice:
        self.heard.append(update)
        if not self.answers:
            await asyncio.Event().wait()
        has_new_priors = update.priors_id not in (None, self.priors_id)
        plans = {R: PLAN} if update.outcomes else {}
        return RouterAdvice(
            plans=plans, priors=PRIORS if has_new_priors else None, priors_id=self.priors_id
        )

    def link(
        self,
        apply: Callable[[Plans], None] | None = None,
        *,
        timeout_s: float = 20.0,
        priors_interval_s: float = RARELY_S,
    ) -> RouterLink:
        return RouterLink(
            pipeline="p",
            ask=self.ask,
            apply=apply or self._apply,
            adopt=self.adopted.append,
            interval_s=0.01,
            timeout_s=timeout_s,
            priors_interval_s=priors_interval_s,
        )

    def _apply(self, plans: Plans) -> None:
        if plans:
            self.applied.append(plans)


def _outcome() -> Outcome:
    return Outcome(request_id=R, num_drafted=3, num_accepted=2)


async def _until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(20.0):
        while not holds():  # noqa: ASYNC110  # the link has no event for this
            await asyncio.sleep(0.005)


def test_news_of_several_rounds_go_out_as_one_without_evidence_and_the_answer_is_applied() -> None:
    async def run() -> None:
        router = Router()
        link = router.link()
        link.start()
        link.admitted(REQUEST)
        seen = Evidence(depth=0, top1_prob=0.5)
        link.observed([structs.replace(_outcome(), evidence=(seen,) * 3)], [])
        link.observed([_outcome()], [R])
        await _until(lambda: router.applied)
        await asyncio.sleep(0.1)  # no further message
        assert router.heard == [
            RouterNews(
                pipeline="p",
                admitted=(Admission(R, "chat", "c"),),
                outcomes=(_outcome(), _outcome()),
                finished=(R,),
                priors_id="",
            )
        ]
        assert router.applied == [{R: PLAN}]

    asyncio.run(run())


def test_a_silent_router_costs_its_advice_and_is_asked_again() -> None:
    async def run() -> None:
        router = Router(answers=False)
        link = router.link(timeout_s=0.2)
        link.start()
        link.observed([_outcome()], [])
        await _until(lambda: router.heard)
        assert router.applied == []
        router.answers = True
        link.observed([_outcome()], [])
        await _until(lambda: router.adopted)
        assert [len(update.outcomes) for update in router.heard] == [1, 1]
        assert router.applied == [{R: PLAN}]
        assert router.adopted == [PRIORS]

    asyncio.run(run())


def test_plans_that_cannot_be_applied_do_not_end_the_link() -> None:
    async def run() -> None:
        router = Router()
        tried: list[Plans] = []

        def apply(plans: Plans) -> None:
            tried.append(plans)
            if len(tried) == 1:
                raise KeyError("no such request")

        link = router.link(apply)
        link.start()
        link.observed([_outcome()], [])
        await _until(lambda: len(tried) == 1)
        link.observed([_outcome()], [])
        await _until(lambda: len(tried) == 2)
        assert tried == [{R: PLAN}, {R: PLAN}]

    asyncio.run(run())


def test_priors_are_asked_for_at_once_and_taken_when_they_are_others() -> None:
    async def run() -> None:
        router = Router()
        link = router.link(priors_interval_s=0.25)
        link.start()
        link.start()
        await _until(lambda: len(router.heard) == 2)
        assert [update.priors_id for update in router.heard] == ["", "1"]
        assert router.adopted == [PRIORS]
        router.priors_id = "2"
        await _until(lambda: len(router.adopted) == 2)
        assert router.adopted == [PRIORS, PRIORS]

    asyncio.run(run())


def test_with_nothing_to_say_the_router_is_left_alone() -> None:
    async def run() -> None:
        router = Router()
        link = router.link()
        link.start()
        await _until(lambda: router.adopted)
        link.observed([], [])
        await asyncio.sleep(0.1)
        assert len(router.heard) == 1

    asyncio.run(run())
