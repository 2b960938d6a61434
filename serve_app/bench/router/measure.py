"""What planning costs the router: questions, timing and tables of `eesd bench router`.

The cost must not depend on how many requests are live. Saving is timed in two parts: the copy that
planning waits for, and the writing that it does not.
"""

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

from eesd_dist.bench.output import print_report, say_unless
from eesd_dist.provenance import collect_provenance
from eesd_dist.routing.beliefs import BeliefBook
from eesd_dist.types import Outcome, RequestId
from serve_app.bench.options import RouterOptions

LOADS = (1, 100, 10_000)
_PACE_S = 0.002
WORKLOADS = tuple(f"class {i}" for i in range(8))


@dataclass(frozen=True, slots=True, kw_only=True)
class BookCost:
    """Medians over many calls, in a process that does nothing else."""

    num_live: int
    request_us: float
    """Admission and end of a request."""
    round_us: float
    """Learning from one round of one request and planning its next."""
    batch_round_us: float
    """The same for a round of 32 requests, divided by 32."""
    copy_ms: float
    """Copying the pools for a checkpoint, which planning waits for."""
    save_ms: float
    """Writing the copy, in another thread."""
    plan_during_save_ms: float
    """A round of 32, planned every few milliseconds while the copy is written; the median."""
    plan_alone_ms: float
    """The same when nothing is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorCost:
    """The same questions over Ray: round trips as a drafting actor sees them."""

    num_live: int
    round_trip_ms: float
    """News of one request's round, and its plan; the median."""
    batch_round_trip_ms: float
    """News of 32 requests' rounds; the median."""
    p99_ms: float
    """Of the latter, checkpoints under way included."""


class ActorRouter:
    """A router behind an actor, as far as this benchmark needs it."""

    def __init__(self, exchange: Callable[[Sequence[str], Sequence[Outcome]], None]) -> None:
        """`exchange` admits requests, reports outcomes and waits for the plans."""
        self.exchange = exchange


RouterFactory = Callable[[Path], AbstractContextManager[ActorRouter]]
"""Starts a separate router that saves to this file once a second."""


def run(options: RouterOptions, *, actor: RouterFactory | None = None) -> None:
    repeats = 200 if options.quick else 2000
    say = say_unless(options.json)
    provenance = collect_provenance(seed=0)
    for line in provenance.lines():
        say(line)
    say(
        "\nin process per request  per round  of a batch of 32   copy    save     saving      alone"
    )
    books = []
    for num_live in LOADS:
        books.append(book_cost(num_live, repeats=repeats))
        say(_book_line(books[-1]))
    actors: list[ActorCost] = []
    if actor is not None:
        say("\nover Ray    one round  a batch of 32      p99")
        for cost in _actor_costs(actor, repeats=repeats // 5):
            actors.append(cost)
            say(_actor_line(cost))
    report = {
        "bench": "router",
        "summary": {
            "round_us": {str(cost.num_live): cost.round_us for cost in books},
            "request_us": {str(cost.num_live): cost.request_us for cost in books},
            "dearer_with_10000": books[-1].round_us / books[0].round_us,
        },
        "in_process": [asdict(cost) for cost in books],
        "over_ray": [asdict(cost) for cost in actors],
        "provenance": provenance.as_json(),
    }
    print_report(report)


def book_cost(num_live: int, *, repeats: int) -> BookCost:
    book = BeliefBook()
    live = [RequestId(f"live-{i}") for i in range(num_live)]
    for i, request_id in enumerate(live):
        book.admit(request_id, WORKLOADS[i % len(WORKLOADS)])
    rounds = _rounds(live, Random(0))
    come_and_gone = iter(RequestId(f"new-{i}") for i in range(repeats))

    def come_and_go() -> None:
        request_id = next(come_and_gone)
        book.admit(request_id, WORKLOADS[0])
        book.finish(request_id)

    with tempfile.TemporaryDirectory() as folder:
        saving = _saving(book, rounds, Path(folder) / "beliefs.json")
    return BookCost(
        num_live=num_live,
        request_us=1e6 * _median_s(come_and_go, repeats),
        round_us=1e6 * _median_s(lambda: book.observe([next(rounds)]), repeats),
        batch_round_us=1e6 / 32 * _median_s(lambda: book.observe(_batch(rounds)), repeats // 10),
        copy_ms=1e3 * saving.copy_s,
        save_ms=1e3 * saving.save_s,
        plan_during_save_ms=1e3 * saving.during_save_s,
        plan_alone_ms=1e3 * saving.alone_s,
    )


def _saving(book: BeliefBook, rounds: Iterator[Outcome], file: Path) -> "_Saving":
    began_s = time.perf_counter()
    copy = book.copy()
    copy_s = time.perf_counter() - began_s
    thread = threading.Thread(target=copy.save, args=(file,))
    thread.start()
    during_save_s = [_paced_plan_s(book, rounds)]
    while thread.is_alive():
        during_save_s.append(_paced_plan_s(book, rounds))
    save_s = time.perf_counter() - began_s - copy_s
    thread.join()
    alone_s = [_paced_plan_s(book, rounds) for _ in during_save_s]
    return _Saving(
        copy_s=copy_s,
        save_s=save_s,
        during_save_s=statistics.median(during_save_s),
        alone_s=statistics.median(alone_s),
    )


class _Saving(NamedTuple):
    copy_s: float
    save_s: float
    during_save_s: float
    alone_s: float


def _paced_plan_s(book: BeliefBook, rounds: Iterator[Outcome]) -> float:
    """A round of 32 as it comes now and then, waiting for the interpreter's lock included."""
    began_s = time.perf_counter()
    time.sleep(_PACE_S)
    book.observe(_batch(rounds))
    return time.perf_counter() - began_s - _PACE_S


def _actor_costs(actor: RouterFactory, *, repeats: int) -> Iterator[ActorCost]:
    for num_live in LOADS:
        with tempfile.TemporaryDirectory() as folder, actor(Path(folder) / "beliefs.json") as one:
            live = [RequestId(f"live-{i}") for i in range(num_live)]
            for first in range(0, num_live, 1000):
                one.exchange(live[first : first + 1000], [])
            rounds = _rounds(live, Random(0))
            single_s = _median_s(lambda: one.exchange([], [next(rounds)]), repeats)  # noqa: B023
            batches_s = [
                _timed_s(lambda: one.exchange([], _batch(rounds)))  # noqa: B023
                for _ in range(repeats)
            ]
        yield ActorCost(
            num_live=num_live,
            round_trip_ms=1e3 * single_s,
            batch_round_trip_ms=1e3 * statistics.median(batches_s),
            p99_ms=1e3 * statistics.quantiles(batches_s, n=100)[-1],
        )


def _rounds(live: Sequence[RequestId], rng: Random) -> Iterator[Outcome]:
    """Rounds without end, of requests in random order."""
    while True:
        num_drafted = rng.randrange(9)
        yield Outcome(
            request_id=rng.choice(live),
            num_drafted=num_drafted,
            num_accepted=rng.randint(0, num_drafted),
        )


def _batch(rounds: Iterator[Outcome]) -> list[Outcome]:
    return [next(rounds) for _ in range(32)]


def _median_s(run: Callable[[], object], repeats: int) -> float:
    return statistics.median(_timed_s(run) for _ in range(max(repeats, 3)))


def _timed_s(run: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


def _book_line(cost: BookCost) -> str:
    return (
        f"{cost.num_live:>6} live {cost.request_us:>9.1f} us {cost.round_us:>7.1f} us "
        f"{cost.batch_round_us:>15.1f} us {cost.copy_ms:>4.1f} ms {cost.save_ms:>6.0f} ms "
        f"{cost.plan_during_save_ms:>10.2f} ms {cost.plan_alone_ms:>7.2f} ms"
    )


def _actor_line(cost: ActorCost) -> str:
    return (
        f"{cost.num_live:>6} live {cost.round_trip_ms:>7.2f} ms {cost.batch_round_trip_ms:>12.2f} "
        f"ms {cost.p99_ms:>6.1f} ms"
    )
