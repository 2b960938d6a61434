import asyncio
import time
from collections.abc import Mapping

import pytest

from eesd_dist.errors import CapacityError, EngineError
from serve_app.batch import loop
from serve_app.batch.loop import Bodies, RowLoop, ServiceAway
from serve_app.batch.results import RowResult
from serve_app.batch.rows import Row
from serve_app.openai.workloads import Kind


class _Service:
    """Fails so many times, then answers."""

    def __init__(self, error: EngineError | CapacityError, *, num_failures: int) -> None:
        self._error = error
        self._num_failures = num_failures
        self.num_calls = 0

    async def answer(self, kind: Kind, body: Mapping[str, object]) -> bytes:
        self.num_calls += 1
        if self.num_calls <= self._num_failures:
            raise self._error
        return b'{"id": "x"}'


def _result(service: _Service, *, patience_s: float = 60.0) -> RowResult:
    rows = RowLoop(service.answer, concurrency=1, body_of=Bodies(), patience_s=patience_s)
    return asyncio.run(rows.result_of(Row(custom_id="r", digest="", body={"prompt": "x"})))


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(loop, "_MAX_PAUSE_S", 0.002)
    monkeypatch.setattr(CapacityError, "retry_after_s", 0.001)


@pytest.mark.parametrize("error", [ServiceAway("connection refused"), CapacityError("full")])
def test_a_service_that_is_away_or_full_is_waited_for(
    error: EngineError | CapacityError, caplog: pytest.LogCaptureFixture
) -> None:
    service = _Service(error, num_failures=50)
    assert not _result(service).has_failed
    assert service.num_calls == 51
    assert len(caplog.records) == isinstance(error, ServiceAway)  # said once


def test_waiting_has_an_end() -> None:
    began_s = time.monotonic()
    result = _result(_Service(ServiceAway("gone"), num_failures=10**9), patience_s=0.1)
    assert result.error == "gone"
    assert result.is_engine_failure
    assert time.monotonic() - began_s < 10.0


def test_a_failing_engine_has_a_few_attempts() -> None:
    assert not _result(_Service(EngineError("a bug"), num_failures=3)).has_failed
    service = _Service(EngineError("a bug"), num_failures=4)
    assert _result(service).has_failed
    assert service.num_calls == 4
