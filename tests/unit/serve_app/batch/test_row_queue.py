from collections.abc import Iterator

import pytest

from eesd_dist.errors import EngineError
from serve_app.batch.quarantine import MAX_BARREN_DEATHS
from serve_app.batch.results import RowResult, answered
from serve_app.batch.row_queue import RowQueue
from serve_app.batch.rows import Row


def _rows(number: int) -> Iterator[Row]:
    for ordinal in range(number):
        yield Row(custom_id=f"row {ordinal}", digest="", body={}, ordinal=ordinal)


def _queue(number: int) -> tuple[RowQueue, list[RowResult]]:
    results: list[RowResult] = []
    return RowQueue(_rows(number), results.append, num_rows=number), results


def _answer(queue: RowQueue, engine: str, rows: list[Row]) -> None:
    for row in rows:
        queue.end(engine, answered(row, b"{}"))


def test_rows_are_given_once_and_the_job_is_done_with_the_last_result() -> None:
    queue, results = _queue(5)
    queue.join("a")
    queue.join("b")
    first, second = queue.next("a", 3), queue.next("b", 3)
    assert [row.ordinal for row in [*first, *second]] == [0, 1, 2, 3, 4]
    _answer(queue, "b", second)
    assert not queue.is_done
    _answer(queue, "a", first)
    assert queue.is_done
    assert sorted(result.ordinal for result in results) == [0, 1, 2, 3, 4]


def test_no_engine_has_more_than_its_share_of_the_rows_that_are_left() -> None:
    queue, _ = _queue(100)
    queue.join("a")
    assert queue.share() == 100
    queue.join("b")
    queue.join("c")
    assert queue.share() == 34
    _answer(queue, "a", queue.next("a", 98))
    assert queue.share() == 1
    queue.died("c")
    assert queue.share() == 1


def test_rows_of_a_dead_engine_run_apart_then_alone_and_the_killer_is_named() -> None:
    queue, results = _queue(20)
    queue.join("a")
    queue.join("b")
    queue.next("a", 10)
    others = queue.next("b", 4)
    assert queue.died("a") == 10
    group = queue.suspects("b")
    assert len(group) == 8
    _answer(queue, "b", others)
    queue.died("b")
    queue.join("a")
    queue.join("b")
    for row in group[:-1]:
        assert queue.suspects("b") == [row]  # alone: two deaths each
        _answer(queue, "b", [row])
    killer = group[-1]
    for _ in range(2):
        assert queue.suspects("b") == [killer]
        queue.died("b")
        queue.join("b")
    assert [row.ordinal for row in queue.suspects("b")] == [8, 9]  # together: one death each
    (error,) = [result for result in results if result.has_failed]
    assert error.custom_id == killer.custom_id
    assert error.error_code == "poison_request"
    assert len(results) == 4 + 8


def test_engines_are_told_when_there_are_rows_to_take_over() -> None:
    queue, _ = _queue(2)
    calls: list[str] = []
    queue.on_change.append(lambda: calls.append("changed"))
    queue.join("a")
    rows = queue.next("a", 3)
    calls.clear()
    queue.died("a")
    assert calls
    queue.join("b")
    assert queue.suspects("b") == rows
    calls.clear()
    _answer(queue, "b", rows)
    assert calls  # for engines that wait for the end
    assert queue.is_done


def test_engines_that_die_and_answer_nothing_end_the_job() -> None:
    queue, _ = _queue(1000)

    def die() -> None:
        queue.join("a")
        queue.next("a", 64)  # other rows every time
        queue.died("a")
        queue.died("b")  # without rows, while it loads

    for _ in range(MAX_BARREN_DEATHS):
        die()
    with pytest.raises(EngineError, match="an engine has died 9 times in a row"):
        die()


@pytest.mark.parametrize("num_rows", [4, 1000])
@pytest.mark.parametrize("num_killers", [1, 4, 40])
def test_however_many_rows_kill_each_is_named(num_rows: int, num_killers: int) -> None:
    queue, results = _queue(num_rows)
    killers = set(range(min(num_killers, num_rows)))
    while not queue.is_done:
        queue.join("a")
        rows = queue.suspects("a") or queue.next("a", 64)
        if killers & {row.ordinal for row in rows}:
            queue.died("a")
        else:
            _answer(queue, "a", rows)
    assert {result.ordinal for result in results if result.has_failed} == killers
    assert len(results) == num_rows
