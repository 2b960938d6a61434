"""The queue between the round loop, which makes tokens, and their streams."""

import asyncio
from dataclasses import replace

import pytest

from eesd_dist.errors import EngineError, RequestError
from eesd_dist.types import Emission, Request, RequestId, SamplingParams, TokenId
from eesd_dist.workers.streams.mailboxes import Mailboxes

R = RequestId("r")
REQUEST = Request(request_id=R, prompt=(TokenId(1),), sampling=SamplingParams())


def _emission(token: int, request_id: RequestId = R, *, submission: int = 0) -> Emission:
    return Emission(
        request_id=request_id, tokens=(TokenId(token),), num_accepted=0, submission=submission
    )


def test_what_piles_up_leaves_together_and_in_order() -> None:
    async def run() -> None:
        mail = Mailboxes()
        box = mail.open(REQUEST)
        mail.deliver([_emission(1), _emission(9, RequestId("other"))])
        mail.deliver([_emission(2)])
        assert await box.take() == (_emission(1), _emission(2))

    asyncio.run(run())


def test_a_reader_waits_until_something_arrives() -> None:
    async def run() -> None:
        mail = Mailboxes()
        reading = asyncio.ensure_future(mail.open(REQUEST).take())
        await asyncio.sleep(0)
        assert not reading.done()
        mail.deliver([_emission(1)])
        assert await reading == (_emission(1),)

    asyncio.run(run())


def test_tokens_come_before_the_error_that_followed_them() -> None:
    async def run() -> None:
        mail = Mailboxes()
        box = mail.open(REQUEST)
        mail.deliver([_emission(1)])
        mail.fail_all(EngineError("broke"))
        assert await box.take() == (_emission(1),)
        assert isinstance(await box.take(), EngineError)

    asyncio.run(run())


def test_an_id_is_in_use_until_it_is_closed() -> None:
    async def run() -> None:
        mail = Mailboxes()
        box = mail.open(REQUEST)
        with pytest.raises(RequestError, match="already being served"):
            mail.open(REQUEST)
        mail.close(R)
        assert "cancelled" in str(await box.take())
        mail.open(REQUEST)
        assert len(mail) == 1

    asyncio.run(run())


def test_what_an_earlier_submission_made_is_not_put_into_the_box_of_a_later_one() -> None:
    async def run() -> None:
        mail = Mailboxes()
        mail.open(replace(REQUEST, submission=1))
        assert not mail.close(R, 2)
        assert mail.close(R, 1)
        box = mail.open(replace(REQUEST, submission=2))
        assert not mail.close(R, 1)
        assert mail.deliver([_emission(7, submission=1), _emission(8, submission=2)]) == {R}
        assert await box.take() == (_emission(8, submission=2),)

    asyncio.run(run())
