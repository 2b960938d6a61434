"""Outcomes go out and plans come back, and nobody ever waits for the router."""

import asyncio
from collections.abc import Mapping

from eesd_dist.actors.contracts import RouterNews
from eesd_dist.actors.router_link import RouterLink
from eesd_dist.control.belief import Belief
from eesd_dist.routing.beliefs import DraftPlan
from eesd_dist.types import Outcome, RequestId

R = RequestId("r")
PLAN = DraftPlan(request_id=R, belief=Belief())


class Router:
    def __init__(self, *, answers: bool = True) -> None:
        self.answers = answers
        self.heard: list[RouterNews] = []
        self.applied: list[Mapping[RequestId, DraftPlan]] = []

    async def ask(self, news: RouterNews) -> Mapping[RequestId, DraftPlan]:
        self.heard.append(news)
        if not self.answers:
            await asyncio.Event().wait()
        return {R: PLAN}

    def link(self) -> RouterLink:
        return RouterLink(
            pipeline="p", ask=self.ask, apply=self.applied.append, interval_s=0.01, timeout_s=0.05
        )


def _outcome() -> Outcome:
    return Outcome(request_id=R, num_drafted=3, num_accepted=2)


def test_news_of_several_rounds_go_out_as_one_and_the_answer_is_applied() -> None:
    async def run() -> None:
        router = Router()
        link = router.link()
        link.start()
        link.admitted(R, "chat")
        link.observed([_outcome()], [])
        link.observed([_outcome()], [R])
        await asyncio.sleep(0.1)
        assert router.heard == [
            RouterNews(
                pipeline="p",
                admitted=((R, "chat"),),
                outcomes=(_outcome(), _outcome()),
                finished=(R,),
            )
        ]
        assert router.applied == [{R: PLAN}]

    asyncio.run(run())


def test_a_silent_router_costs_its_advice_and_is_asked_again() -> None:
    async def run() -> None:
        router = Router(answers=False)
        link = router.link()
        link.start()
        link.observed([_outcome()], [])
        await asyncio.sleep(0.15)
        assert router.applied == []
        router.answers = True
        link.observed([_outcome()], [])
        await asyncio.sleep(0.1)
        assert [len(news.outcomes) for news in router.heard] == [1, 1]
        assert router.applied == [{R: PLAN}]

    asyncio.run(run())


def test_plans_that_cannot_be_applied_do_not_end_the_link() -> None:
    async def run() -> None:
        router = Router()
        tried: list[Mapping[RequestId, DraftPlan]] = []

        def apply(plans: Mapping[RequestId, DraftPlan]) -> None:
            tried.append(plans)
            if len(tried) == 1:
                raise KeyError("no such request")

        link = RouterLink(pipeline="p", ask=router.ask, apply=apply, interval_s=0.01)
        link.start()
        for _ in range(2):
            link.observed([_outcome()], [])
            await asyncio.sleep(0.05)
        assert tried == [{R: PLAN}, {R: PLAN}]

    asyncio.run(run())


def test_with_nothing_to_say_the_router_is_left_alone() -> None:
    async def run() -> None:
        router = Router()
        link = router.link()
        link.start()
        link.start()
        link.observed([], [])
        await asyncio.sleep(0.05)
        assert router.heard == []

    asyncio.run(run())
