"""Refused connections are counted one by one and logged once a minute for each host."""

import logging

import pytest

from eesd_dist.transport.authentication.refused import RefusedConnections


def test_every_connection_is_counted_and_each_host_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    time_s = 100.0
    refusals = RefusedConnections(clock=lambda: time_s)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            refusals.add("10.0.0.7", at="10.0.0.1:4000", reason="wrong secret")
        refusals.add("10.0.0.8", at="10.0.0.1:4000", reason="wrong secret")
        assert [record.args and record.args[0] for record in caplog.records] == [  # type: ignore[index]
            "10.0.0.7",
            "10.0.0.8",
        ]
        time_s += 60.0
        refusals.add("10.0.0.7", at="10.0.0.1:4000", reason="wrong secret")
    assert len(caplog.records) == 3
    assert (
        caplog.messages[0]
        == "connection refused: from=10.0.0.7 at=10.0.0.1:4000 reason=wrong secret"
    )
    assert refusals.num_refused == 7


def test_a_scan_from_many_hosts_does_not_grow_without_bound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusals = RefusedConnections(clock=lambda: 0.0)
    with caplog.at_level(logging.CRITICAL):
        for number in range(2000):
            refusals.add(f"10.0.{number // 256}.{number % 256}", at="-", reason="-")
    assert refusals.num_refused == 2000
    assert len(refusals._logged_s) <= 256
