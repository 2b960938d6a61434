"""What a chaos run calls lost, and how it measures silence."""

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Collection
from dataclasses import replace
from random import Random

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from eesd_dist.bench.load_client import Listener, Streamed, stream
from serve_app.bench.chaos.report import (
    InjectedFault,
    Noticed,
    complaints,
    fate_of,
    recovery_of,
    rows_of,
    silence_after,
    summarise,
    table,
)
from tests.support.live_server import serving

QUIET: dict[str, object] = {
    "unnoticed": [],
    "missed": [],
    "left_out": [],
    "ended_early": False,
    "interruptions_undisturbed": 0,
}


def _streamed(
    *tokens: int, name: str = "chaos-0", request_s: float = 0.0, arrivals_s: tuple[float, ...] = ()
) -> Streamed:
    return Streamed(
        name=name,
        tokens=tokens,
        text=" ".join(map(str, tokens)),
        num_tokens=len(tokens),
        finish_reason="length",
        is_done=True,
        error=None,
        start_s=request_s,
        arrivals_s=arrivals_s,
        ended_s=arrivals_s[-1] if arrivals_s else request_s,
    )


def _fault(
    kind: str = "verify rank",
    *,
    at: float,
    streams: Collection[str] = (),
    number: int = 0,
    landed: float | None = None,
) -> InjectedFault:
    return InjectedFault(
        number=number,
        kind=kind,
        victim="verify rank 0",
        pipeline="p",
        injected_s=at,
        landed_s=at if landed is None else landed,
        when_ready=True,
        streams=frozenset(streams),
    )


def test_the_same_stream_is_the_same() -> None:
    assert fate_of(_streamed(1, 2, 3), _streamed(1, 2, 3)) == "same"


@pytest.mark.parametrize(
    "broken",
    [
        {"finish_reason": None},
        {"is_done": False},
        {"error": "given up after 5 interruptions"},
    ],
)
def test_a_stream_without_its_proper_end_is_lost(broken: dict[str, object]) -> None:
    cut = replace(_streamed(1, 2, 3), **broken)  # type: ignore[arg-type]
    assert fate_of(_streamed(1, 2, 3), cut) == "lost"


def test_a_stream_that_was_cut_off_after_a_right_beginning_is_lost_and_not_changed() -> None:
    cut = replace(_streamed(1, 2), finish_reason=None, is_done=False, error="gone")
    assert fate_of(_streamed(1, 2, 3, 4), cut) == "lost"


def test_whatever_piece_comes_twice_is_found_wherever_it_stands() -> None:
    rng = Random(0)
    for _ in range(200):
        # All different, so that nothing repeats by itself.
        expected = rng.sample(range(1000), 30)
        end = rng.randrange(1, 30)
        start = rng.randrange(end)
        got = expected[:end] + expected[start:]
        for seen in (got, got[:30]):
            if seen != expected:
                assert fate_of(_streamed(*expected), _streamed(*seen)) == "repeated"


def test_another_a_missing_and_an_additional_token_are_a_changed_text() -> None:
    expected = _streamed(1, 2, 3, 4, 5)
    for other in ((1, 2, 9, 4, 5), (1, 2, 4, 5), (1, 2, 3, 4, 5, 6), (1, 2, 3, 4)):
        assert fate_of(expected, _streamed(*other)) == "changed"


def test_where_tokens_were_left_out_is_said_and_how_many() -> None:
    expected = [_streamed(*range(10), name=f"chaos-{i}") for i in range(3)]
    got = [_streamed(0, 1, 2, 5, 6, 7, 8, 9), _streamed(0, 1, 77, *range(3, 10)), _streamed(0, 1)]
    cut = replace(got[2], is_done=False)
    expected, got = (
        [replace(s, ended_s=1.0) for s in streams] for streams in (expected, [*got[:2], cut])
    )
    rows = summarise(expected, got, [])["not_the_same"]
    assert isinstance(rows, list)
    assert [(r["same_until"], r["missing_there"]) for r in rows] == [(3, 2), (2, None), (2, 8)]


@pytest.mark.parametrize("field", [{"text": "1 2 4"}, {"num_tokens": 4}, {"finish_reason": "stop"}])
def test_text_count_and_reason_have_to_agree_too(field: dict[str, object]) -> None:
    other = replace(_streamed(1, 2, 3), **field)  # type: ignore[arg-type]
    assert fate_of(_streamed(1, 2, 3), other) == "changed"


def test_silence_lasts_from_the_fault_to_the_token_after_the_longest_pause() -> None:
    # Struck at 10.0; a token that was on its way comes at 10.1, the next one at 14.0.
    stream = _streamed(1, 2, 3, 4, request_s=9.0, arrivals_s=(9.5, 10.1, 14.0, 14.1))
    assert silence_after(_fault(at=10.0), stream) == pytest.approx(4.0)


def test_tokens_of_a_rank_before_its_kill_has_landed_are_no_recovery() -> None:
    # The kill is sent at 10.0 and has arrived on the other host at 12.0 at the latest.
    stream = _streamed(1, 2, 3, 4, request_s=9.0, arrivals_s=(10.4, 10.8, 11.9, 16.0))
    assert silence_after(_fault(at=10.0, landed=12.0), stream) == pytest.approx(6.0)


def test_a_pause_long_after_a_fault_is_not_of_its_making() -> None:
    stream = _streamed(1, 2, 3, 4, request_s=9.0, arrivals_s=(9.9, 10.2, 12.0, 30.0))
    assert silence_after(_fault(at=10.0), stream) == pytest.approx(2.0)


def test_a_stream_that_never_spoke_again_has_no_silence_to_measure() -> None:
    assert silence_after(_fault(at=10.0), _streamed(1, request_s=9.0, arrivals_s=(9.5,))) is None


def test_a_request_still_waiting_for_its_first_token_waits_too() -> None:
    assert silence_after(
        _fault(at=10.0), _streamed(1, request_s=9.9, arrivals_s=(13.0,))
    ) == pytest.approx(3.0)


def test_a_fault_after_which_no_stream_spoke_again_counts_as_infinite() -> None:
    ended = _streamed(1, name="chaos-0", request_s=9.0, arrivals_s=(9.5,))
    cut = replace(ended, name="chaos-1", is_done=False, finish_reason=None, ended_s=40.0)
    assert recovery_of(_fault(at=10.0, streams={"chaos-0"}), [ended, cut]) is None
    recovery = recovery_of(_fault(at=10.0, streams={"chaos-0", "chaos-1"}), [ended, cut])
    assert recovery is not None
    assert recovery.last_s == math.inf
    report = summarise([ended, ended], [ended, cut], [_fault(at=10.0, streams={"chaos-1"})])
    assert report["recovery_p50_s"] == math.inf
    assert "p50 never" in table(report | QUIET)


@pytest.mark.parametrize(
    ("figures", "reasons"),
    [
        ({}, []),
        ({"kills": 0}, ["nothing was broken: give it longer streams, or more of them"]),
        ({"lost": 2}, ["2 streams lost"]),
        ({"unnoticed": [4]}, ["the service did not notice faults [4]"]),
        (
            {"ended_early": True},
            ["the schedule ended early, since the service was not ready again in time"],
        ),
    ],
)
def test_a_run_that_broke_nothing_or_was_not_noticed_is_no_success(
    figures: dict[str, object], reasons: list[str]
) -> None:
    good = {"kills": 3, "lost": 0, "repeated": 0, "changed": 0} | QUIET
    assert complaints(good | figures) == reasons


def test_recovery_is_of_the_struck_pipelines_streams_alone() -> None:
    streams = [
        _streamed(1, 2, name="chaos-0", arrivals_s=(9.9, 12.0)),
        _streamed(1, 2, name="chaos-1", arrivals_s=(9.9, 13.0)),
        _streamed(1, 2, name="chaos-2", arrivals_s=(9.9, 50.0)),
    ]
    recovery = recovery_of(_fault(at=10.0, streams={"chaos-0", "chaos-1"}), streams)
    assert recovery is not None
    assert (recovery.first_s, recovery.last_s) == (pytest.approx(2.0), pytest.approx(3.0))
    assert recovery_of(_fault("router", at=10.0, streams={"chaos-0"}), streams) is None
    assert recovery_of(_fault(at=60.0, streams={"chaos-0"}), streams) is None


def test_kills_with_overlapping_silences_are_left_out_of_the_figures_of_those_alone() -> None:
    stream = _streamed(1, 2, 3, 4, 5, arrivals_s=(1.0, 9.0, 20.0, 23.0, 23.1))
    pair = [_fault(at=t, streams={"chaos-0"}, number=n) for n, t in enumerate((2.0, 3.0))]
    single = _fault(at=20.5, streams={"chaos-0"}, number=2)
    router = _fault("router", at=21.0, streams=set(), number=3)
    report = summarise([stream], [stream], [*pair, single, router])
    assert (report["alone_kills"], report["alone_p95_s"]) == (1, 2.5)
    assert report["recovery_p95_s"] == 7.0
    assert report["recovery_by_kind"]["verify rank"]["alone_p95_s"] == 2.5  # type: ignore[index]
    proxy = _fault("proxy", at=19.0, number=4)  # its port is not back yet
    assert summarise([stream], [stream], [*pair, single, proxy])["alone_kills"] == 0


def test_the_summary_counts_fates_kills_and_interruptions() -> None:
    undisturbed = [_streamed(1, 2, 3, name=f"chaos-{i}", arrivals_s=(1, 2, 3)) for i in range(4)]
    disturbed = [
        replace(undisturbed[0], arrivals_s=(1.0, 6.0, 6.5), ended_s=7.0, num_resumed=2),
        replace(undisturbed[1], tokens=(1, 2), finish_reason=None, error="its process has died"),
        replace(undisturbed[2], tokens=(1, 2, 1)),
        replace(undisturbed[3], tokens=(1, 8, 3)),
    ]
    faults = [
        _fault(at=2.0, streams={"chaos-0", "chaos-1"}),
        _fault("hang", at=2.1, streams={"chaos-0"}, number=1),
        _fault("router", at=2.2, streams=set(), number=2),
    ]
    report = summarise(undisturbed, disturbed, faults)
    expected = {"requests": 4, "kills": 3, "lost": 1, "repeated": 1, "changed": 1}
    assert {key: report[key] for key in expected} == expected
    assert (report["resumed"], report["resumptions"]) == (1, 2)
    assert (report["recovery_p50_s"], report["recovery_p95_s"]) == (3.9, 4.0)
    assert (report["interruptions"], report["most_interruptions_of_one"]) == (3, 2)
    assert report["longest_pause_s"] == 5.0
    assert "its process has died" in json.dumps(report["not_the_same"])
    assert [row["recovery_s"] for row in rows_of(faults, disturbed)] == [4.0, 3.9, None]
    text = table(report | QUIET | {"missed": ["fault 3 (link): nobody there"], "unnoticed": [1]})
    assert "missed: fault 3 (link): nobody there" in text
    assert "faults that were not noticed: [1]" in text
    assert "failed: 1 streams lost" in text
    assert "4 requests, 3 kills: 1 lost, 1 repeated, 1 changed" in text
    assert "1 requests resumed by their client, 2 times" in text
    assert re.search(r"router +1( +-){5}\n?", text)


def test_when_a_fault_was_noticed_and_as_what_is_told_by_fault_and_by_kind() -> None:
    stream = _streamed(1, 2, 3, arrivals_s=(1.0, 30.0, 60.0))
    faults = [
        _fault("stuck thread", at=2.0 + 29 * number, streams={"chaos-0"}, number=number)
        for number in range(2)
    ]
    noticed = {0: Noticed(after_s=21.25, trouble="lost verify rank 0")}
    rows = rows_of(faults, [stream], noticed)
    assert [row["noticed_s"] for row in rows] == [21.25, None]
    assert [row["noticed_as"] for row in rows] == ["lost verify rank 0", None]
    report = summarise([stream], [stream], faults, noticed)
    text = table(report | QUIET | {"left_out": ["silent peer: no ptrace"]})
    assert "left out: silent peer: no ptrace" in text
    assert re.search(r"stuck thread +2 +21\.2 s +21\.2 s +28\.0 s", text)


def _chunk(*tokens: int, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": "\u0085" * len(tokens), "token_ids": list(tokens)}
    return _event({"choices": [choice | {"finish_reason": finish_reason}]})


def _event(content: dict[str, object]) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()


async def _completions(request: Request) -> Response:
    """The prompt says what happens."""
    wish = (await request.json())["prompt"]
    if wish == "refused":
        return JSONResponse({"error": {"message": "queue full"}}, status_code=429)

    async def events() -> AsyncIterator[bytes]:
        yield _chunk(5, 6)
        if wish == "error":
            yield _event({"error": {"message": "given up"}})
        if wish == "broken":
            raise ConnectionError("this server goes away")
        if wish == "whole":
            yield _chunk(7, finish_reason="length")
            yield _event({"choices": [], "usage": {"completion_tokens": 3}})
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def _listened(wish: str) -> Streamed:
    async def ask(url: str) -> Streamed:
        listener = Listener("chaos-0")
        async with httpx.AsyncClient(base_url=url) as client:
            await stream(client, listener, {"prompt": wish})
        return listener.heard()

    with serving(Starlette(routes=[Route("/v1/completions", _completions, methods=["POST"])])) as u:
        return asyncio.run(ask(u))


def test_a_whole_stream_is_heard_to_its_end() -> None:
    stream = _listened("whole")
    assert stream.is_complete
    assert (stream.tokens, stream.text, stream.num_tokens) == ((5, 6, 7), "\u0085" * 3, 3)
    assert stream.start_s < stream.arrivals_s[0] <= stream.arrivals_s[1] <= stream.ended_s


@pytest.mark.parametrize(
    ("wish", "message", "tokens"),
    [
        ("refused", "answered 429", ()),
        ("error", "given up", (5, 6)),
        ("broken", "the connection broke", (5, 6)),
    ],
)
def test_a_stream_that_fails_says_how_and_keeps_what_came(
    wish: str, message: str, tokens: tuple[int, ...]
) -> None:
    stream = _listened(wish)
    assert not stream.is_complete
    assert stream.error is not None
    assert message in stream.error
    assert stream.tokens == tokens


def test_a_stream_that_ends_without_a_reason_is_not_complete() -> None:
    stream = _listened("quiet")
    assert stream.is_done
    assert stream.error is None
    assert not stream.is_complete


class _Breaking:
    """A service of which every connection breaks after one event, in the middle of the next one."""

    def __init__(self, *, answers_400: bool = False, is_away_at_first: bool = False) -> None:
        self.asked_after: list[str | None] = []
        self._answers_400 = answers_400
        self._is_away = is_away_at_first

    async def answer(self, request: Request) -> Response:
        after = request.headers.get("last-event-id")
        if self._is_away:
            self._is_away = False
            return Response("Internal Server Error", status_code=500)
        self.asked_after.append(after)
        if len(self.asked_after) == 2:
            return JSONResponse({}, status_code=400 if self._answers_400 else 503)
        first = 0 if after is None else int(after) + 1

        async def events() -> AsyncIterator[bytes]:
            if first == 2:
                yield b"id: 2\n" + _chunk(2, finish_reason="length")
                yield _event({"choices": [], "usage": {"completion_tokens": 3}})
                yield b"data: [DONE]\n\n"
                return
            yield b": resumed\n\n" + f"id: {first}\n".encode() + _chunk(first)
            yield f"id: {first + 1}\n".encode()
            raise ConnectionError("this server goes away")

        return StreamingResponse(events(), media_type="text/event-stream")

    def heard(self, *, max_attempts: int) -> Streamed:
        async def ask(url: str) -> Streamed:
            listener = Listener("chaos-0")
            async with httpx.AsyncClient(base_url=url) as client:
                await stream(client, listener, {"prompt": "x"}, max_attempts=max_attempts)
            return listener.heard()

        with serving(
            Starlette(routes=[Route("/v1/completions", self.answer, methods=["POST"])])
        ) as url:
            return asyncio.run(ask(url))


def test_a_stream_whose_connection_breaks_continues_after_its_last_whole_event() -> None:
    service = _Breaking()
    stream = service.heard(max_attempts=4)
    assert stream.is_complete
    assert (stream.tokens, stream.num_resumed) == ((0, 1, 2), 2)
    assert service.asked_after == [None, "0", "0", "1"]


def test_a_patient_client_repeats_what_a_front_that_goes_away_answers() -> None:
    """Serve's proxy says so of a request that a killed ingress had not answered yet."""
    patient = _Breaking(is_away_at_first=True).heard(max_attempts=5)
    assert patient.is_complete
    assert (patient.num_turned_away, patient.num_resumed) == (2, 2)
    impatient = _Breaking(is_away_at_first=True).heard(max_attempts=1)
    assert "answered 500" in (impatient.error or "")


def test_a_stream_that_breaks_too_often_or_is_refused_says_how() -> None:
    broken = _Breaking().heard(max_attempts=3)
    assert (broken.tokens, broken.num_resumed, broken.is_complete) == ((0, 1), 1, False)
    assert "the connection broke" in (broken.error or "")
    refusal = _Breaking(answers_400=True).heard(max_attempts=4)
    assert (refusal.tokens, refusal.num_resumed) == ((0,), 0)
    assert "answered 400" in (refusal.error or "")
