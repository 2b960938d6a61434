"""Which errors a stream survives, for how long, and which requests are refused."""

from dataclasses import replace

import pytest
from msgspec import structs

from eesd_dist.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    EesdError,
    EngineCrashed,
    EngineError,
    LeaseLost,
    Migrated,
    PeerLost,
    PoisonRequest,
    QueueFull,
    RequestError,
    WireError,
)
from eesd_dist.types import Emission, FinishReason, Request, RequestId, SamplingParams, TokenId
from serve_app.ingress.retry import Attempts

REQUEST = Request(
    request_id=RequestId("r"), prompt=(TokenId(1), TokenId(2)), sampling=SamplingParams()
)
LOST = PeerLost(peer="p", operation="stream", reason="its process has died")
FULL = QueueFull(num_waiting=4, limit=4)
CRASHED = EngineCrashed("index out of range", was_alone=False)
CRASHED_ALONE = EngineCrashed("index out of range", was_alone=True)
PATIENCE_S = 60.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _attempts(clock: Clock | None = None, *, suspect_after: int = 2) -> Attempts:
    return Attempts(REQUEST, suspect_after=suspect_after, clock=clock or Clock())


def _token(token: int) -> tuple[Emission, ...]:
    return (
        Emission(
            request_id=REQUEST.request_id,
            tokens=(TokenId(token),),
            num_accepted=0,
            num_cached_prompt_tokens=2,
            queue_s=0.5,
        ),
    )


def _fail(attempts: Attempts, error: EesdError) -> float:
    return attempts.failed(error, patience_s=PATIENCE_S)


@pytest.mark.parametrize(
    "error",
    [
        RequestError("too long", param="prompt"),
        ConfigError("no such key"),
        CheckpointError(file="f", found="nothing", expected="weights"),
        WireError("a stale message"),
        LeaseLost("claimed"),
        PoisonRequest(request_id=REQUEST.request_id, crashes=3, reason="it broke"),
        EngineError("request r was cancelled"),
    ],
)
@pytest.mark.parametrize("has_tokens", [False, True])
def test_an_error_that_another_attempt_would_meet_too_ends_the_stream(
    error: EesdError, has_tokens: bool
) -> None:
    attempts = _attempts()
    if has_tokens:
        attempts.received(_token(5))
    with pytest.raises(type(error)) as raised:
        _fail(attempts, error)
    assert raised.value is error


@pytest.mark.parametrize("error", [LOST, CRASHED, Migrated(by="p", to=None, reason="drained")])
def test_a_stream_survives_the_loss_the_crash_and_the_migration_of_its_pipeline(
    error: EesdError,
) -> None:
    attempts = _attempts()
    _fail(attempts, error)
    assert attempts.last_error is error
    attempts.received(_token(5))
    _fail(attempts, error)
    retry = attempts.next(7)
    assert (retry.generated, retry.submission) == ((5,), 7)
    assert attempts.tokens == (1, 2, 5)


@pytest.mark.parametrize("error", [FULL, CapacityError("no pipeline takes requests now")])
def test_a_full_queue_refuses_a_new_request_and_is_waited_for_by_one_that_was_admitted(
    error: CapacityError,
) -> None:
    with pytest.raises(type(error)):
        _fail(_attempts(), error)
    with_tokens = _attempts()
    with_tokens.received(_token(5))
    assert _fail(with_tokens, error) > 0
    without_tokens = _attempts()
    _fail(without_tokens, LOST)
    assert _fail(without_tokens, error) > 0
    continued = replace(REQUEST, is_continued=True)
    assert _fail(Attempts(continued, suspect_after=2, clock=Clock()), error) > 0


def test_a_queue_that_stays_full_does_not_use_up_the_patience_with_broken_pipelines() -> None:
    clock = Clock()
    attempts = _attempts(clock)
    attempts.received(_token(5))
    for _ in range(3):
        _fail(attempts, FULL)
        clock.now_s += PATIENCE_S
    assert attempts.stuck_s == 0.0
    _fail(attempts, LOST)
    assert attempts.stuck_s == 0.0
    clock.now_s += PATIENCE_S + 1
    with pytest.raises(EngineError, match="no token within 60 s"):
        _fail(attempts, LOST)


def test_pauses_double_up_to_a_second_and_are_short_again_after_a_token() -> None:
    attempts = _attempts()
    pauses = [_fail(attempts, LOST) for _ in range(8)]
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    attempts.received(_token(5))
    assert attempts.last_error is None
    assert _fail(attempts, LOST) == 0.05


def test_an_empty_emission_is_no_token() -> None:
    attempts = _attempts()
    _fail(attempts, CRASHED)
    attempts.received((structs.replace(_token(5)[0], tokens=(), finish_reason=FinishReason.ABORT),))
    assert attempts.next(1).crashes == 1
    assert _fail(attempts, LOST) == 0.1, "it is the second failure in a row"


def test_a_migration_is_followed_at_once_but_not_one_after_the_other() -> None:
    attempts = _attempts()
    moved = Migrated(by="p", to=None, reason="drained")
    assert [_fail(attempts, moved) for _ in range(3)] == [0.0, 0.1, 0.2]
    attempts.received(_token(5))
    assert _fail(attempts, moved) == 0.0
    attempts = _attempts()
    _fail(attempts, LOST)
    assert _fail(attempts, moved) > 0.0


def test_a_migrated_stream_knows_its_target_and_which_pipelines_have_sent_it_on() -> None:
    attempts = _attempts()
    _fail(attempts, Migrated(by="a", to="b", reason="drained"))
    assert (attempts.target, attempts.refused) == ("b", {"a"})
    _fail(attempts, Migrated(by="b", to=None, reason="drained"))
    assert (attempts.target, attempts.refused) == (None, {"a", "b"})
    _fail(attempts, Migrated(by="", to=None, reason="a request is tested alone"))
    assert attempts.refused == {"a", "b"}
    attempts.received(_token(5))
    assert attempts.refused == set()


def test_patience_ends_with_the_reason_and_starts_again_with_a_token() -> None:
    clock = Clock()
    attempts = _attempts(clock)
    assert attempts.stuck_s == 0.0
    _fail(attempts, LOST)
    clock.now_s += PATIENCE_S
    assert attempts.stuck_s == PATIENCE_S
    _fail(attempts, CRASHED)
    attempts.received(_token(5))
    assert attempts.stuck_s == 0.0
    clock.now_s += 1000.0
    _fail(attempts, LOST)
    clock.now_s += PATIENCE_S + 1
    with pytest.raises(
        EngineError, match=r"no token within 60 s, given up: .*its process has died"
    ):
        _fail(attempts, LOST)


def test_a_request_is_a_suspect_after_enough_crashes_and_refused_after_one_alone() -> None:
    attempts = _attempts()
    assert (attempts.next(1).is_suspect, attempts.next(1).crashes) == (False, 0)
    _fail(attempts, CRASHED)
    assert not attempts.next(2).is_suspect
    _fail(attempts, CRASHED)
    assert (attempts.next(3).is_suspect, attempts.next(3).crashes) == (True, 2)
    with pytest.raises(PoisonRequest, match="index out of range") as caught:
        _fail(attempts, CRASHED_ALONE)
    assert caught.value.crashes == 3


def test_a_request_that_was_alone_anyway_is_refused_after_as_many_crashes_as_make_a_suspect() -> (
    None
):
    attempts = _attempts(suspect_after=2)
    _fail(attempts, CRASHED_ALONE)
    with pytest.raises(PoisonRequest) as caught:
        _fail(attempts, CRASHED_ALONE)
    assert caught.value.crashes == 2


def test_tokens_do_not_gather_in_the_attempt_after_a_crash() -> None:
    attempts = Attempts(replace(REQUEST, flush_interval_s=None), suspect_after=2, clock=lambda: 0.0)
    _fail(attempts, Migrated(by="p", to=None, reason="drained"))
    assert attempts.next(1).flush_interval_s is None
    attempts.lost("process", was_admitted=True)
    assert attempts.next(2).flush_interval_s == 0.0
    attempts.received(_token(5))
    assert attempts.next(3).flush_interval_s is None
    _fail(attempts, CRASHED)
    assert attempts.next(4).flush_interval_s == 0.0


def test_a_token_clears_a_suspect() -> None:
    attempts = _attempts()
    for _ in range(3):
        _fail(attempts, CRASHED)
        _fail(attempts, CRASHED)
        assert attempts.next(1).is_suspect
        attempts.received(_token(5))
        assert (attempts.next(2).is_suspect, attempts.next(2).crashes) == (False, 0)
    assert attempts.next(3).generated == (5, 5, 5)


def test_only_crashes_that_the_engine_reported_count_against_a_request() -> None:
    attempts = _attempts()
    for _ in range(20):
        for error in (LOST, Migrated(by="p", to=None, reason="drained"), FULL):
            _fail(attempts, error)
    assert (attempts.next(1).crashes, attempts.next(1).is_suspect) == (0, False)


def test_what_a_later_attempt_says_of_cache_and_queue_is_not_the_clients_business() -> None:
    attempts = _attempts()
    assert attempts.received(_token(5)) == _token(5)
    _fail(attempts, LOST)
    (emission,) = attempts.received(_token(6))
    assert (emission.tokens, emission.num_cached_prompt_tokens, emission.queue_s) == ((6,), 0, None)


def test_interruptions_are_counted_and_a_full_queue_is_none() -> None:
    attempts = _attempts()
    assert attempts.received(_token(5))[0].num_interruptions == 0
    for error in (LOST, FULL, Migrated(by="a", to="b", reason="drained"), CRASHED):
        _fail(attempts, error)
    assert attempts.received(_token(6))[0].num_interruptions == 3
    _fail(attempts, LOST)
    assert attempts.received(_token(7))[0].num_interruptions == 4


def test_a_death_that_is_blamed_late_counts_as_the_request_ran_in_that_process() -> None:
    attempts = _attempts()
    for _ in range(2):
        _fail(attempts, CRASHED)
    attempts.next(1)  # a suspect from here on
    _fail(attempts, LOST)
    early = _attempts()
    early.next(1)
    early.lost("first", was_admitted=True)
    _fail(early, LOST)
    for _ in range(2):
        _fail(early, CRASHED)
    early.next(2)
    early.blame({"first"})  # it was with others there, though it is a suspect by now
    attempts.lost("second", was_admitted=True)
    with pytest.raises(PoisonRequest):
        attempts.blame({"second"})


def test_a_death_counts_once_and_not_as_alone_for_a_request_that_was_not_taken() -> None:
    attempts = _attempts()
    for _ in range(2):
        _fail(attempts, CRASHED)
    assert attempts.next(1).is_suspect
    attempts.lost("dead", was_admitted=False)
    _fail(attempts, LOST)
    attempts.lost("dead", was_admitted=True)  # what is known of the first attempt stays
    attempts.blame({"dead"})
    assert attempts.next(2).crashes == 3
    attempts.lost("dead", was_admitted=True)  # chosen again, since the ingress has not heard of it
    attempts.blame({"dead"})
    assert attempts.next(3).crashes == 3
