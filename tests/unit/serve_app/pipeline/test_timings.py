"""The times of supervision, and the order that they must have."""

import pytest

from eesd_dist.errors import ConfigError
from serve_app.config import ServiceConfig, service_config
from serve_app.pipeline.timings import Timings, timings_of


def _config(timeout_s: float = 20.0, **recovery: float) -> ServiceConfig:
    engine = {"model": {"path": "."}, "parallel": {"timeout_s": timeout_s}}
    return service_config({"engine": engine, "recovery": recovery})


def test_the_defaults_of_the_configuration_are_in_order() -> None:
    timings = timings_of(_config())
    assert (timings.deadline_s, timings.load_s, timings.lease_s) == (20.0, 900.0, 60.0)
    assert timings.worker_heartbeat_s < timings.stall_s < timings.deadline_s


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"lease_s": 15.0},
            "found engine.parallel.timeout_s 20 and recovery.lease_s 15, expected the first to be "
            "shorter",
        ),
        (
            {"load_timeout_s": 20.0},
            "found engine.parallel.timeout_s 20 and recovery.load_timeout_s 20, expected",
        ),
        (
            {"timeout_s": 0.2},
            "found worker_heartbeat_s 0.5 and engine.parallel.timeout_s 0.2, expected",
        ),
        (
            {"timeout_s": 5.0, "lease_s": 6.0},
            "found leave_s 8 and recovery.lease_s 6, expected",
        ),
    ],
)
def test_times_in_the_wrong_order_are_refused_with_their_configuration_keys(
    settings: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        timings_of(_config(**settings))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("shorter", "longer"),
    [
        ("worker_heartbeat_s", "deadline_s"),
        ("worker_heartbeat_s", "stall_s"),
        ("grace_s", "deadline_s"),
        ("deadline_s", "lease_s"),
        ("deadline_s", "load_s"),
        ("ping_s", "leave_s"),
        ("leave_s", "lease_s"),
        ("retry_s", "max_retry_s"),
    ],
)
def test_every_wait_is_shorter_than_the_one_that_contains_it(shorter: str, longer: str) -> None:
    good = {"deadline_s": 20.0, "load_s": 900.0, "lease_s": 60.0}
    timings = Timings(**good)
    wrong = {**good, shorter: getattr(timings, longer)}
    with pytest.raises(ConfigError, match="expected the first to be shorter"):
        Timings(**wrong)
