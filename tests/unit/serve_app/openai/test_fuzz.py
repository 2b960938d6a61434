"""Random requests among valid ones: the client's errors stay the client's."""

import asyncio
import time
from collections import Counter
from random import Random

import pytest

from tests.support.fuzzing import fuzz
from tests.support.gated_server import gated_server, num_live
from tests.support.raw_http import exchange
from tests.support.request_fuzzer import RequestFuzzer, valid_request

FUZZER = RequestFuzzer(num_compared=40)


def _fuzz(number: int, *, seed: int) -> Counter[int | None]:
    with gated_server(read_timeout_s=1.0, head_timeout_s=1.0) as port:
        fuzzing = asyncio.run(fuzz(port, range(number), seed=seed, fuzzer=FUZZER, num_pings=100))
        deadline_s = time.monotonic() + 10.0
        while num_live(port) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert num_live(port) == 0
        assert asyncio.run(exchange(port, valid_request(Random(seed)))).status == 200
    assert not fuzzing.failures, "\n".join(fuzzing.failures)
    assert fuzzing.num_compared > number // 10
    return fuzzing.statuses


def test_no_request_breaks_the_service_or_stays_in_it() -> None:
    statuses = _fuzz(200, seed=11)
    assert statuses[200] > 40
    assert statuses[400] > 20
    assert statuses[408] > 0


@pytest.mark.slow
def test_five_thousand_requests_leave_nothing_behind() -> None:
    statuses = _fuzz(5000, seed=12)
    assert statuses[200] > 1000
    assert statuses[400] > 500
    assert statuses[408] > 10
