"""Refused requests take few lines of the log, however many and from however many clients."""

import asyncio
import logging

import pytest

from serve_app.openai.middleware.refusal_log import RefusalLog


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]


@pytest.fixture(autouse=True)
def level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_the_first_refusal_of_a_client_is_logged_at_once_and_the_others_as_a_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def refuse() -> None:
        log = RefusalLog(interval_s=0.05)
        for _ in range(1000):
            log.note(client="10.0.0.7", status=401, path="'/v1/completions'", reason="wrong key")
        log.note(client="10.0.0.7", status=400, path="'/'", reason="control characters")
        log.note(client="10.0.0.8", status=401, path="'/'", reason="wrong key")
        assert len(_lines(caplog)) == 3
        await asyncio.sleep(0.1)
        log.note(client="10.0.0.7", status=401, path="'/'", reason="wrong key")

    asyncio.run(refuse())
    first, _, _, number, last = _lines(caplog)
    assert (
        first == "request refused: client=10.0.0.7 status=401 path='/v1/completions' "
        "reason=wrong key"
    )
    assert number == "more requests refused: client=10.0.0.7 status=401 count=999 within_s=0.05"
    assert last.startswith("request refused: client=10.0.0.7 status=401")


def test_many_clients_share_the_last_lines(caplog: pytest.LogCaptureFixture) -> None:
    async def refuse() -> None:
        log = RefusalLog(interval_s=0.05)
        for number in range(2000):
            client = f"10.0.{number // 256}.{number % 256}"
            log.note(client=client, status=401, path="'/'", reason="wrong key")
        await asyncio.sleep(0.1)

    asyncio.run(refuse())
    assert len(_lines(caplog)) == 256 + 2
    assert _lines(caplog)[-1].startswith(
        "more requests refused: client=others status=401 count=1743 "
    )
