"""A worker is lost by its heartbeats: silence, or work without progress; time alone is neither."""

import pytest

from eesd_dist.workers.messages import WorkerStatus
from serve_app.pipeline.pulse import Pulse
from tests.support.toy_group import toy_timings

TIMINGS = toy_timings(deadline_s=20.0, peers_s=1.0, busy_s=30.0, lease_s=60.0, load_s=900.0)
BEAT_S = 0.5


def _status(progress: int, **changes: object) -> WorkerStatus:
    fields: dict[str, object] = {"epoch": 1, "is_busy": True, **changes}
    return WorkerStatus(progress=progress, **fields)  # type: ignore[arg-type]


def _beats(pulse: Pulse, seconds: float, *statuses: WorkerStatus) -> None:
    """Passes the time with these answers in turn, one a beat; without one it is silence."""
    for number in range(round(seconds / BEAT_S)):
        pulse.passed(BEAT_S)
        if statuses:
            pulse.received(statuses[number % len(statuses)])


def test_a_worker_in_an_epoch_that_does_not_answer_is_lost_after_the_deadline() -> None:
    pulse = Pulse(TIMINGS)
    pulse.received(_status(1))
    _beats(pulse, 20.0)
    assert pulse.failure() is None
    assert pulse.still_s == 20.0
    _beats(pulse, 0.5)
    assert pulse.failure() == ("heartbeat", "no answer within 20 s")


def test_an_answer_ends_the_silence() -> None:
    pulse = Pulse(TIMINGS)
    _beats(pulse, 19.0)
    pulse.received(_status(1))
    assert pulse.still_s == 0.0
    _beats(pulse, 19.0)
    assert pulse.failure() is None


def test_a_worker_that_starts_may_be_silent_for_longer() -> None:
    pulse = Pulse(TIMINGS)
    _beats(pulse, 30.0)
    assert pulse.failure() is None
    _beats(pulse, 0.5)
    assert pulse.failure() == ("heartbeat", "no answer within 30 s")


def test_work_without_progress_is_a_loss_though_the_worker_answers() -> None:
    pulse = Pulse(TIMINGS)
    pulse.received(_status(7))
    _beats(pulse, 21.0, _status(7))
    assert pulse.failure() is None, "a rank that waits for another one would say so first"
    _beats(pulse, 0.5, _status(7))
    assert pulse.failure() == ("rounds", "no progress within 20 s")


@pytest.mark.parametrize("step", [1, -1])
def test_any_change_of_progress_is_progress(step: int) -> None:
    """The number of an idle loop counts its turns downward."""
    pulse = Pulse(TIMINGS)
    for number in range(200):
        _beats(pulse, BEAT_S, _status(step * number))
        assert pulse.failure() is None
        assert pulse.still_s == 0.0


def test_an_idle_rank_that_waits_for_a_round_is_not_lost_and_its_next_round_has_all_its_time() -> (
    None
):
    pulse = Pulse(TIMINGS)
    _beats(pulse, 3600.0, _status(0, is_busy=False))
    assert pulse.failure() is None
    assert pulse.still_s == 0.0
    _beats(pulse, 21.0, _status(0))
    assert pulse.failure() is None
    _beats(pulse, 1.0, _status(0))
    assert pulse.failure() is not None


def test_rounds_with_waits_between_them_are_not_added_up() -> None:
    pulse = Pulse(TIMINGS)
    for _ in range(10):
        _beats(pulse, 15.0, _status(3))
        _beats(pulse, 0.5, _status(3, is_busy=False))
    assert pulse.failure() is None


def test_a_phase_has_its_own_bound_which_is_never_below_the_deadline() -> None:
    loading = _status(5, epoch=0, phase="loading", allowed_s=60.0)
    pulse = Pulse(TIMINGS)
    pulse.received(loading)
    _beats(pulse, 61.0, loading)
    assert pulse.failure() is None
    _beats(pulse, 0.5, loading)
    assert pulse.failure() == ("loading", "no progress within 60 s")

    short = _status(5, epoch=0, phase="joining an epoch", allowed_s=1.0)
    pulse = Pulse(TIMINGS)
    pulse.received(short)
    _beats(pulse, 21.0, short)
    assert pulse.failure() is None
    _beats(pulse, 0.5, short)
    assert pulse.failure() == ("joining an epoch", "no progress within 20 s")


@pytest.mark.parametrize(
    "status",
    [
        _status(5, epoch=2),
        _status(5, phase="joining an epoch"),
        _status(6),
        _status(5, num_moved=1),
    ],
    ids=["epoch", "phase", "progress", "pages"],
)
def test_another_epoch_phase_or_number_is_other_work(status: WorkerStatus) -> None:
    pulse = Pulse(TIMINGS)
    _beats(pulse, 15.0, _status(5))
    _beats(pulse, BEAT_S, status)
    assert pulse.still_s == 0.0
    assert pulse.status == status


def test_time_in_which_the_supervisor_was_stopped_is_not_counted() -> None:
    """A supervisor counts at most two beats from one look to the next."""
    pulse = Pulse(TIMINGS)
    pulse.received(_status(1))
    _beats(pulse, 18.0)
    pulse.passed(2 * BEAT_S)  # stopped for an hour
    assert pulse.failure() is None
    pulse.received(_status(2))
    assert pulse.still_s == 0.0


def test_the_time_that_is_left_is_that_of_silence_or_of_progress_whichever_ends_first() -> None:
    pulse = Pulse(TIMINGS)
    pulse.received(_status(1))
    assert pulse.left_s == 20.0, "silence"
    _beats(pulse, 5.0, _status(1))
    assert pulse.left_s == 16.0, "progress, with a second for the peers' reports"
    pulse.received(_status(1, is_busy=False))
    pulse.passed(BEAT_S)
    assert pulse.left_s == 19.5
    _beats(pulse, 19.5)
    assert (pulse.left_s, pulse.failure()) == (0.0, None)
    pulse.passed(0.001)
    assert pulse.failure() is not None


def test_a_worker_that_migrates_pages_lives_for_as_long_as_they_move() -> None:
    pulse = Pulse(TIMINGS)
    for num_moved in range(10):
        _beats(pulse, 15.0, _status(5, num_moved=num_moved))
    assert pulse.failure() is None
    _beats(pulse, 7.0, _status(5, num_moved=9))
    assert pulse.failure() == ("rounds", "no progress within 20 s")
