"""The ends of requests that the router receives, the duration of leases, and leaving an epoch
before joining it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from eesd_dist.config import EngineConfig
from eesd_dist.errors import EesdError, Migrated, PeerLost
from eesd_dist.schedule.page_leases import PageLease
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.types import Request, RequestId, SamplingParams, TokenId
from eesd_dist.workers import drafting_actor
from eesd_dist.workers.drafting_actor import DraftActor
from eesd_dist.workers.joining import Joining
from eesd_dist.workers.messages import (
    Address,
    Epoch,
    RouterAdvice,
    RouterNews,
    StreamItem,
    TelemetryOptions,
)
from eesd_dist.workers.roles import DraftLeader
from tests.support.toy_stages import (
    TOKENS_PER_ROUND,
    ToyDrafter,
    ToyLeader,
    ToyStages,
    ToyStep,
    toy_token,
)


def _request(name: str, *, max_tokens: int = 1000) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens)
    return Request(request_id=RequestId(name), prompt=(TokenId(1),), sampling=sampling)


class Router:
    def __init__(self) -> None:
        self.live: set[str] = set()
        self.met: list[str] = []
        self.ended: list[str] = []

    async def __call__(self, news: RouterNews) -> RouterAdvice:
        self.met += [request_id for request_id, _ in news.admitted]
        self.live |= {request_id for request_id, _ in news.admitted}
        self.live |= {outcome.request_id for outcome in news.outcomes}
        self.live -= set(news.finished)
        self.ended += news.finished
        return RouterAdvice(plans={})


async def _some(items: AsyncIterator[StreamItem]) -> None:
    async for item in items:
        assert isinstance(item, tuple)
        return


def test_the_router_hears_the_end_of_requests_that_are_cancelled_left_or_refused() -> None:
    async def run() -> None:
        router = Router()
        config = EngineConfig.model_validate(
            {"model": {"path": "."}, "scheduler": {"max_waiting": 2}}
        )
        actor = DraftActor(
            config,
            name="p",
            stages=ToyStages(),
            telemetry=TelemetryOptions(model_name="toy"),
            ask_router=router,
        )
        store = Address(host="nowhere", port=1)
        await actor.join(Epoch(number=1, store=store, num_verify_ranks=1, timeout_s=1.0))
        left, cancelled = actor.submit(_request("left")), actor.submit(_request("cancelled"))
        async with aclosing(cancelled):
            async with aclosing(left):
                await _some(left)
                await _some(cancelled)
                refusal = [item async for item in actor.submit(_request("refused"))]
                assert type(refusal[0]).__name__ == "QueueFull"
            await actor.cancel(RequestId("cancelled"), 0)
            assert [item async for item in cancelled]
        await asyncio.sleep(0.3)
        assert router.live == set()
        assert sorted(router.met) == ["cancelled", "left"]
        assert await actor.leave()

    asyncio.run(run())


class _Slow(ToyDrafter):
    """A drafter that holds back its finished tokens until it may emit them."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.may_leave = threading.Event()
        self.has_made = threading.Event()

    def step(self, *, wait_s: float) -> ToyStep:
        result = super().step(wait_s=wait_s)
        if result.emissions:
            self.has_made.set()
            self.may_leave.wait(5.0)
        return result


@dataclass(frozen=True)
class _Leading(ToyStages):
    """Toy stages with this leader."""

    leader: Callable[[EngineConfig], DraftLeader]

    def draft_leader(self, config: EngineConfig, tracing: Tracing) -> DraftLeader:
        return self.leader(config)


@asynccontextmanager
async def _joined(
    drafter: ToyDrafter, *, ask_router: Router | None = None
) -> AsyncIterator[DraftActor]:
    class Leader(ToyLeader):
        def join(self, epoch: Epoch, *, new_engine: bool) -> ToyDrafter:
            return drafter

    config = EngineConfig.model_validate({"model": {"path": "."}})
    telemetry = TelemetryOptions(model_name="toy")
    actor = DraftActor(
        config,
        name="p",
        stages=_Leading(Leader),
        telemetry=telemetry,
        ask_router=ask_router,
    )
    store = Address(host="nowhere", port=1)
    await actor.join(Epoch(number=1, store=store, num_verify_ranks=1, timeout_s=1.0))
    yield actor
    assert await actor.leave()


async def _tokens(items: AsyncIterator[StreamItem]) -> list[int]:
    """Returns the tokens up to the end of the stream or its error."""
    tokens: list[int] = []
    async for item in items:
        if isinstance(item, EesdError):
            break
        tokens += [token for emission in item for token in emission.tokens]
    return tokens


def _first(request: Request) -> Request:
    return replace(request, submission=1)


def test_tokens_still_on_their_way_when_a_request_is_moved_out_are_not_those_of_its_return() -> (
    None
):
    async def run() -> None:
        drafter = _Slow(EngineConfig.model_validate({"model": {"path": "."}}))
        async with _joined(drafter) as actor:
            request = _request("back", max_tokens=6)
            first = asyncio.ensure_future(_tokens(actor.submit(_first(request))))
            await asyncio.to_thread(drafter.has_made.wait, 5.0)
            assert await actor.evict(None, Migrated(by="p", to=None, reason="test")) == 1
            assert await first == []
            again = replace(request, submission=2)
            second = asyncio.ensure_future(_tokens(actor.submit(again)))
            await asyncio.sleep(0.05)
            drafter.may_leave.set()
            assert await second == [toy_token(request, 1 + i) for i in range(6)]

    asyncio.run(run())


def test_the_last_token_of_an_earlier_submission_ends_no_later_one_for_the_router() -> None:
    async def run() -> None:
        drafter, router = _Slow(EngineConfig.model_validate({"model": {"path": "."}})), Router()
        async with _joined(drafter, ask_router=router) as actor:
            request = _request("back", max_tokens=TOKENS_PER_ROUND)
            first = asyncio.ensure_future(_tokens(actor.submit(_first(request))))
            await asyncio.to_thread(drafter.has_made.wait, 5.0)
            await actor.evict(None, Migrated(by="p", to=None, reason="test"))
            await first
            longer = replace(_request("back", max_tokens=100_000), submission=2)
            async with aclosing(actor.submit(longer)) as second:
                waiting = asyncio.ensure_future(_some(second))
                await asyncio.sleep(0.05)
                drafter.may_leave.set()
                await waiting
                await asyncio.sleep(0.5)
                assert router.live == {"back"}
                assert router.ended == ["back"], "as it was moved out, and not again"
        await asyncio.sleep(0.5)
        assert router.live == set()

    asyncio.run(run())


def test_a_cancellation_that_overtook_its_submission_counts() -> None:
    async def run() -> None:
        drafter = ToyDrafter(EngineConfig.model_validate({"model": {"path": "."}}))
        async with _joined(drafter) as actor:
            request = _request("early", max_tokens=4)
            await actor.cancel(request.request_id, 1)
            assert await _tokens(actor.submit(_first(request))) == []
            assert drafter.load().num_running == 0
            assert len(await _tokens(actor.submit(replace(request, submission=2)))) == 4

    asyncio.run(run())


def test_a_submission_that_overtook_the_cancellation_of_the_one_before_stays() -> None:
    async def run() -> None:
        drafter = ToyDrafter(EngineConfig.model_validate({"model": {"path": "."}}))
        async with _joined(drafter) as actor:
            request = _request("late", max_tokens=20)
            first = actor.submit(_first(request))
            await _some(first)
            second = asyncio.ensure_future(_tokens(actor.submit(replace(request, submission=2))))
            await asyncio.sleep(0.05)
            await actor.cancel(request.request_id, 1)
            await _tokens(first)
            assert len(await second) == 20

    asyncio.run(run())


def test_whether_a_lease_has_held_is_not_known_between_two_epochs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        drafter = ToyDrafter(EngineConfig.model_validate({"model": {"path": "."}}))
        source = LeaseSource()
        source.may_lease.set()
        async with _joined(drafter) as actor:
            monkeypatch.setattr(type(actor._leader), "sharing", source)
            assert await actor.return_pages((await actor.lease_pages(None, 1.0)).number)
            lease = await actor.lease_pages(None, 1.0)
            await actor.leave()
            assert not await actor.return_pages(lease.number)
            assert source.leased == set()

    asyncio.run(run())


class LeaseSource:
    """The leases of an actor."""

    def __init__(self) -> None:
        self.leased: set[str] = set()
        self.may_lease = threading.Event()

    def lease(self, request_ids: object) -> PageLease:
        del request_ids
        self.may_lease.wait(5.0)
        self.leased.add("n1")
        return PageLease(number="n1", requests=())

    def end_lease(self, number: str) -> bool:
        self.leased.discard(number)
        return True


def test_a_lease_comes_to_its_end_when_the_target_has_given_up_before_it_was_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafting_actor, "_LEASE_MARGIN_S", 0.2)

    async def run() -> None:
        source = LeaseSource()
        config = EngineConfig.model_validate({"model": {"path": "."}})
        actor = DraftActor(
            config, name="p", stages=ToyStages(), telemetry=TelemetryOptions(model_name="toy")
        )
        monkeypatch.setattr(type(actor._leader), "sharing", source)
        leasing = asyncio.ensure_future(actor.lease_pages(None, 0.01))
        await asyncio.sleep(0.05)
        leasing.cancel()
        source.may_lease.set()
        await asyncio.sleep(0.1)
        assert source.leased == {"n1"}
        await asyncio.sleep(0.4)
        assert source.leased == set()

    asyncio.run(run())


class _Connecting(ToyLeader):
    """Connects when allowed, and counts how often the connection was undone."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.has_begun = threading.Event()
        self.may_connect = threading.Event()
        self.num_running = 0
        self.num_undone = 0

    def connect(self, epoch: Epoch) -> None:
        self.num_running += 1
        self.has_begun.set()
        self.may_connect.wait(10.0)
        self.num_running -= 1

    def disconnect(self) -> None:
        self.num_undone += 1


def _connecting() -> tuple[DraftActor, _Connecting]:
    config = EngineConfig.model_validate({"model": {"path": "."}})
    leader = _Connecting(config)
    actor = DraftActor(
        config,
        name="p",
        stages=_Leading(lambda _: leader),
        telemetry=TelemetryOptions(model_name="toy"),
    )
    actor._joining = Joining(name="p", leave_wait_s=0.05)
    return actor, leader


def _epoch(number: int) -> Epoch:
    store = Address(host="nowhere", port=1)
    return Epoch(number=number, store=store, num_verify_ranks=1, timeout_s=1.0)


def test_a_worker_that_is_stuck_in_connecting_has_not_left() -> None:
    async def run() -> None:
        actor, leader = _connecting()
        connecting = asyncio.ensure_future(actor.connect(_epoch(1)))
        await asyncio.to_thread(leader.has_begun.wait, 5.0)
        assert not await actor.leave()
        assert leader.num_undone == 1
        leader.may_connect.set()
        with pytest.raises(PeerLost, match="its epoch was left"):
            await connecting
        assert leader.num_undone == 2, "a late connection is undone"
        assert await actor.leave()

    asyncio.run(run())


def test_what_was_connected_is_undone_by_leaving_and_cannot_be_joined_after() -> None:
    async def run() -> None:
        actor, leader = _connecting()
        leader.may_connect.set()
        await actor.connect(_epoch(1))
        assert leader.num_undone == 0
        assert await actor.leave()
        assert leader.num_undone == 1
        with pytest.raises(PeerLost, match="its epoch was left"):
            await actor.join(_epoch(1))
        await actor.connect(_epoch(2))
        await actor.join(_epoch(2))
        assert leader.num_undone == 1
        assert await actor.leave()

    asyncio.run(run())


def test_a_connection_waits_for_the_one_before_it_and_outlives_it() -> None:
    async def run() -> None:
        actor, leader = _connecting()
        overtaken = asyncio.ensure_future(actor.connect(_epoch(1)))
        await asyncio.to_thread(leader.has_begun.wait, 5.0)
        newest = asyncio.ensure_future(actor.connect(_epoch(2)))
        await asyncio.sleep(0.05)
        assert leader.num_running == 1
        leader.may_connect.set()
        with pytest.raises(PeerLost, match="a newer epoch began"):
            await overtaken
        await newest
        assert leader.num_undone == 1
        assert await actor.leave()

    asyncio.run(run())
