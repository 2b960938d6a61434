"""Random requests against the running service: Ray's proxy, ingress, pipeline and all ranks."""

import asyncio
import json
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.fuzz_service import main
from tests.support.fuzzing import Fuzzing, fuzz
from tests.support.request_fuzzer import RequestFuzzer
from tests.support.running import Running, until


def _is_empty(service: Running) -> bool:
    """Whether no request is left in the engine, no stream in an outbox, and no page in use."""
    stats = service.pipelines.stats.remote().result(timeout_s=30)
    return not (
        stats.num_running
        or stats.num_waiting
        or service.state().num_live
        or stats.free_pages != stats.num_pages
    )


def _fuzzed(service: Running, number: int, *, seed: int, num_pings: int, at_once: int) -> Fuzzing:
    port = urlsplit(service.url).port
    assert port is not None
    before = service.state()
    # Longer than the 20 s after which an incomplete request is answered.
    fuzzing = asyncio.run(
        fuzz(
            port,
            range(number),
            seed=seed,
            fuzzer=RequestFuzzer(num_compared=40, is_service=True),
            num_pings=num_pings,
            at_once=at_once,
            timeout_s=90.0,
        )
    )
    sys.stdout.write(f"{fuzzing}\n")
    assert not fuzzing.failures, "\n".join(fuzzing.failures)
    until(lambda: _is_empty(service))
    assert service.state().num_interruptions == before.num_interruptions
    return fuzzing


def test_three_hundred_requests_leave_no_stream_and_no_page(service: Running) -> None:
    fuzzing = _fuzzed(service, 300, seed=21, num_pings=200, at_once=32)
    assert fuzzing.statuses[200] > 60
    assert fuzzing.statuses[400] > 30
    assert fuzzing.num_compared >= 50


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [22, 23])
def test_two_thousand_five_hundred_requests_and_another_client_is_served_all_the_time(
    service: Running, seed: int
) -> None:
    # Measures the service, so it needs two quiet cores.
    fuzzing = _fuzzed(service, 2500, seed=seed, num_pings=1000, at_once=32)
    assert fuzzing.statuses[200] > 500
    assert fuzzing.statuses[400] > 250
    assert fuzzing.statuses[408] > 5
    assert fuzzing.pings_s[int(0.99 * len(fuzzing.pings_s))] <= 0.2
    assert fuzzing.pings_s[-1] <= 1.0


@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_twenty_thousand_requests_with_a_key_leave_nothing_behind(tmp_path: Path) -> None:
    """The bundled model in a service of its own; `make test-fuzz`."""
    file = tmp_path / "report.json"
    assert main(["--requests", "20000", "--seed", "1", "--report", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["valid"] > report["sent"] // 2
    assert report["engine"]["requests"] > report["sent"] // 2
    assert report["compared_with_plain_decoding"] > 1000
    assert report["resumed"] > 300
