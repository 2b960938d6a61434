"""What is kept of a stream is all of it or nothing, for its window, within bounds."""

import random

import pytest
from msgspec import structs

from eesd_dist.types import (
    Emission,
    FinishReason,
    Request,
    RequestId,
    SamplingParams,
    TokenId,
    TokenLogprobs,
)
from eesd_dist.workers.streams.kept_streams import KeptStreams


class Clock:
    time_s = 0.0

    def __call__(self) -> float:
        return self.time_s


def _request(
    name: str = "a",
    *,
    submission: int = 1,
    resumption: int = 0,
    generated: tuple[int, ...] = (),
    window_s: float = 60.0,
    top_logprobs: int | None = None,
) -> Request:
    return Request(
        request_id=RequestId(name),
        prompt=(TokenId(1),),
        sampling=SamplingParams(top_logprobs=top_logprobs),
        generated=tuple(map(TokenId, generated)),
        submission=submission,
        resumption=resumption,
        resume_window_s=window_s,
    )


def _emission(*tokens: int, name: str = "a", submission: int = 1, num_top: int = 0) -> Emission:
    top = tuple((TokenId(i), -1.0) for i in range(num_top))
    return Emission(
        request_id=RequestId(name),
        tokens=tuple(map(TokenId, tokens)),
        num_accepted=0,
        logprobs=tuple(TokenLogprobs(logprob=-1.0, top=top) for _ in tokens) if num_top else (),
        submission=submission,
    )


def _tokens(emissions: tuple[Emission, ...]) -> list[int]:
    return [token for emission in emissions for token in emission.tokens]


def _kept(streams: KeptStreams, name: str = "a") -> int | None:
    return streams.num_tokens(RequestId(name))


def _resume(streams: KeptStreams, name: str = "a", *, submission: int = 2) -> list[int]:
    replayed = streams.begin(_request(name, submission=submission, resumption=1))
    assert {emission.submission for emission in replayed} <= {submission}
    return _tokens(replayed)


@pytest.mark.parametrize("ended", [False, True])
def test_a_resumed_stream_gets_what_was_kept_and_goes_on_being_kept(ended: bool) -> None:
    streams = KeptStreams()
    assert streams.begin(_request()) == ()
    streams.add(_emission(1, 2))
    streams.add(_emission(3))
    if ended:
        streams.end(RequestId("a"))
    assert _kept(streams) == 3
    assert _resume(streams, submission=2) == [1, 2, 3]
    streams.add(_emission(9, submission=1))
    streams.add(_emission(4, submission=2))
    assert _resume(streams, submission=3) == [1, 2, 3, 4]


def test_a_stream_is_forgotten_when_its_window_is_over_and_not_while_it_is_live() -> None:
    clock = Clock()
    streams = KeptStreams(clock=clock)
    streams.begin(_request(window_s=5.0))
    streams.add(_emission(1))
    clock.time_s = 100.0
    assert _kept(streams) == 1
    streams.end(RequestId("a"))
    clock.time_s = 104.9
    assert _kept(streams) == 1
    clock.time_s = 105.0
    assert _kept(streams) is None
    assert _resume(streams) == []
    assert len(streams) == 1, "the resumed stream"


def test_without_a_window_nothing_is_kept() -> None:
    streams = KeptStreams()
    streams.begin(_request(window_s=0.0))
    streams.add(_emission(1))
    assert (_kept(streams), len(streams)) == (None, 0)


def test_what_is_not_resumed_begins_at_its_first_token() -> None:
    streams = KeptStreams()
    streams.begin(_request())
    streams.add(_emission(1))
    assert streams.begin(_request(submission=2)) == ()
    assert _kept(streams) == 0


def test_a_later_attempt_is_kept_with_the_tokens_that_it_came_with() -> None:
    streams = KeptStreams()
    streams.begin(_request(submission=1))
    streams.add(_emission(1, 2, 3))
    assert streams.begin(_request(submission=2, resumption=1, generated=(1, 2))) == ()
    streams.add(_emission(3, submission=2))
    assert _resume(streams, submission=3) == [1, 2, 3]


def test_a_later_attempt_whose_logprobs_are_not_known_is_not_kept() -> None:
    streams = KeptStreams()
    streams.begin(_request(generated=(1, 2), top_logprobs=0))
    streams.add(_emission(3, num_top=1))
    assert _kept(streams) is None
    streams.begin(_request("b", top_logprobs=0))
    streams.add(_emission(3, name="b", num_top=1))
    assert _kept(streams, "b") == 1


def test_a_finished_stream_is_kept_with_its_end() -> None:
    streams = KeptStreams()
    streams.begin(_request())
    streams.add(
        Emission(
            request_id=RequestId("a"),
            tokens=(TokenId(1),),
            num_accepted=0,
            finish_reason=FinishReason.STOP,
            submission=1,
        )
    )
    streams.end(RequestId("a"))
    (last,) = streams.begin(_request(submission=2, resumption=1))
    assert last.finish_reason is FinishReason.STOP


def test_the_stream_that_ended_first_makes_room_then_the_one_that_began_first() -> None:
    streams = KeptStreams(max_tokens=10)
    for name in "abcd":
        streams.begin(_request(name))
        streams.add(_emission(1, 2, name=name))
    streams.end(RequestId("c"))
    streams.end(RequestId("b"))
    streams.add(_emission(3, 4, 5, name="d"))
    assert [_kept(streams, name) for name in "abcd"] == [2, 2, None, 5]
    streams.add(_emission(6, 7, name="d"))
    assert [_kept(streams, name) for name in "abcd"] == [2, None, None, 7]
    streams.add(_emission(8, 9, name="d"))
    assert [_kept(streams, name) for name in "abcd"] == [None, None, None, 9]
    streams.add(_emission(*range(10, 20), name="d"))
    assert len(streams) == 0
    streams.add(_emission(20, name="d"))
    assert _kept(streams, "d") is None, "or its text would have a hole"


def test_alternatives_of_logprobs_take_room_and_streams_are_counted() -> None:
    streams = KeptStreams(max_tokens=50, max_streams=2)
    streams.begin(_request("a", top_logprobs=20))
    streams.add(_emission(1, 2, name="a", num_top=20))
    assert _kept(streams, "a") == 2
    streams.add(_emission(3, name="a", num_top=20))
    assert _kept(streams, "a") is None
    for name in "bcd":
        streams.begin(_request(name))
    assert [_kept(streams, name) for name in "bcd"] == [None, 0, 0]


def test_log_probabilities_of_a_prompt_take_room() -> None:
    streams = KeptStreams(max_tokens=50)
    streams.begin(_request("a"))
    scored = structs.replace(
        _emission(1, name="a"), prompt_logprobs=_emission(*range(6), num_top=7).logprobs
    )
    streams.add(scored)
    assert _kept(streams, "a") == 1
    streams.add(_emission(2, 3, name="a"))
    assert _kept(streams, "a") is None


@pytest.mark.parametrize("seed", range(20))
def test_what_is_kept_is_the_whole_stream_whatever_happens(seed: int) -> None:
    rng, clock = random.Random(seed), Clock()
    streams = KeptStreams(max_tokens=60, max_streams=5, clock=clock)
    generated: dict[str, list[int]] = {}
    submissions = dict.fromkeys("abcdefgh", 0)
    for _ in range(600):
        name = rng.choice("abcdefgh")
        submission = submissions[name]
        match rng.randrange(5):
            case 0:
                submissions[name] += 1
                resumption = rng.randrange(2)
                replayed = streams.begin(
                    _request(name, submission=submissions[name], resumption=resumption)
                )
                assert _tokens(replayed) in ([], generated.get(name, []))
                generated[name] = _tokens(replayed)
            case 1:
                streams.end(RequestId(name))
                submissions[name] += 1  # what follows is late
            case 2:
                clock.time_s += rng.random() * 20
                streams.expire()
            case _:
                token = rng.randrange(100)
                streams.add(_emission(token, name=name, submission=submission))
                if _is_open(streams, name, submission):
                    generated[name].append(token)
        assert len(streams) <= 5
        assert streams._size <= 60
        assert streams._size == sum(_kept(streams, key) or 0 for key in "abcdefgh")


def _is_open(streams: KeptStreams, name: str, submission: int) -> bool:
    stream = streams._live.get(RequestId(name))
    return stream is not None and stream.submission == submission
