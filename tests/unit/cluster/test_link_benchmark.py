import pytest

from cluster.preflight.link_benchmark import LinkRow, render, run_local
from cluster.preflight.nccl_tests import parse_text


def _row(num_ranks: int, num_wrong: int = 0) -> LinkRow:
    return LinkRow(
        operation="all_reduce",
        size_bytes=1_000_000,
        num_ranks=num_ranks,
        median_us=1000.0,
        fastest_us=800.0,
        p99_us=1500.0,
        num_wrong=num_wrong,
    )


def test_bus_bandwidth_follows_nccl_tests() -> None:
    assert _row(2).algbw_gbps == pytest.approx(1.0)
    assert _row(2).busbw_gbps == pytest.approx(1.0)
    assert _row(8).busbw_gbps == pytest.approx(1.75)


def test_the_table_is_read_by_the_parser_of_nccl_tests() -> None:
    report = parse_text(render([_row(8), _row(2)]))
    assert report.passed
    assert [row.out_of_place.time_us for row in report.rows] == [1000.0, 1000.0]
    assert report.average_busbw_gbps == pytest.approx((1.75 + 1.0) / 2)


def test_elements_that_arrive_wrong_fail_the_table() -> None:
    report = parse_text(render([_row(2, num_wrong=3)]))
    assert report.num_out_of_bounds == 3
    assert not report.passed


@pytest.mark.dist
def test_three_processes_get_what_is_broadcast() -> None:
    rows = run_local(num_ranks=3, sizes=(4096,), num_iterations=2)
    assert [(row.operation, row.num_ranks, row.num_wrong) for row in rows] == [
        ("sendrecv", 3, 0),
        ("broadcast", 3, 0),
        ("all_reduce", 3, 0),
    ]


@pytest.mark.dist
def test_two_processes_reach_each_other() -> None:
    rows = run_local(num_ranks=2, sizes=(4096, 65536), num_iterations=5)
    assert [(row.operation, row.size_bytes) for row in rows] == [
        ("sendrecv", 4096),
        ("sendrecv", 65536),
        ("broadcast", 4096),
        ("broadcast", 65536),
        ("all_reduce", 4096),
        ("all_reduce", 65536),
    ]
    assert all(row.num_wrong == 0 for row in rows)
    assert all(0 < row.fastest_us <= row.median_us <= row.p99_us for row in rows)
