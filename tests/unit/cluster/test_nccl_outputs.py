"""The parser of nccl-tests on real outputs; `data/nccl_tests_outputs.txt` names their sources."""

import re
from functools import cache
from pathlib import Path

import pytest

from cluster.preflight.link_runs import link_of
from cluster.preflight.nccl_tests import BandwidthReport, Timing, parse_text

_FILE = Path(__file__).parent / "data" / "nccl_tests_outputs.txt"
_PART = re.compile(
    r"^@@ (?P<name>\w+) \| (?P<version>.*) \| (?P<source>https://\S+)\n", re.MULTILINE
)


@cache
def _texts() -> dict[str, str]:
    text = _FILE.read_text()
    starts = list(_PART.finditer(text))
    ends = [match.start() for match in starts[1:]] + [len(text)]
    return {match["name"]: text[match.end() : end] for match, end in zip(starts, ends, strict=True)}


def _report(name: str) -> BandwidthReport:
    return parse_text(_texts()[name])


def test_the_outputs_come_from_four_versions_and_more() -> None:
    versions = {match["version"].partition(",")[0] for match in _PART.finditer(_FILE.read_text())}
    assert versions == {"before 2.13", "2.13 to 2.16", "2.13.6", "2.17.8", "2.20.0"}


@pytest.mark.parametrize(
    ("name", "num_rows", "num_devices"),
    [
        ("all_gather_failed_2020", 1, 0),
        ("broadcast_unchecked_2021", 1, 2),
        ("all_reduce_rounding_2021", 3, 0),
        ("sendrecv_2022", 1, 0),
        ("separate_runs_2022", 0, 2),
        ("all_gather_one_gpu_2023", 1, 1),
        ("all_reduce_2024", 5, 0),
        ("sendrecv_2024", 2, 2),
        ("launcher_prefix_2024", 2, 0),
        ("zero_sizes_2023", 2, 0),
        ("busy_devices_2026", 0, 2),
        ("wrong_values_2026", 3, 2),
        ("all_reduce_2026", 2, 2),
    ],
)
def test_every_row_and_device_is_read(name: str, num_rows: int, num_devices: int) -> None:
    report = _report(name)
    assert (len(report.rows), len(report.devices)) == (num_rows, num_devices)


def test_an_old_broadcast_has_a_root_and_is_not_checked() -> None:
    (row,) = _report("broadcast_unchecked_2021").rows
    assert (row.size_bytes, row.redop, row.root) == (8, None, 0)
    assert row.out_of_place == Timing(time_us=45.82, algbw_gbps=0.0, busbw_gbps=0.0, num_wrong=None)
    assert row.in_place is not None
    assert row.in_place.time_us == 38.17


def test_the_rounding_error_of_old_versions_is_no_number_of_wrong_values() -> None:
    for row in _report("all_reduce_rounding_2021").rows:
        assert (row.redop, row.root) == ("sum", None)
        assert row.out_of_place.num_wrong is None


def test_the_largest_error_of_old_versions_is_no_number_either() -> None:
    (row,) = _report("sendrecv_2022").rows
    assert row.in_place is not None
    assert (row.out_of_place.num_wrong, row.in_place.num_wrong) == (0, None)
    report = _report("all_gather_failed_2020")
    assert report.num_out_of_bounds == 2
    assert not report.passed


def test_new_versions_count_wrong_values() -> None:
    report = _report("wrong_values_2026")
    row = report.rows[1]
    assert row.in_place is not None
    assert (row.out_of_place.num_wrong, row.in_place.num_wrong) == (96, 32)
    assert report.num_out_of_bounds == 4
    assert not report.passed


def test_a_good_run_passes_with_the_figures_it_prints() -> None:
    report = _report("all_reduce_2024")
    assert report.passed
    assert report.average_busbw_gbps == 95.3009
    busbw = [
        timing.busbw_gbps
        for row in report.rows
        for timing in (row.out_of_place, row.in_place)
        if timing is not None
    ]
    assert sum(busbw) / len(busbw) == pytest.approx(report.average_busbw_gbps, abs=0.01)


def test_sendrecv_is_never_checked_in_place() -> None:
    for row in _report("sendrecv_2024").rows:
        assert row.in_place is not None
        assert (row.out_of_place.num_wrong, row.in_place.num_wrong) == (0, None)


def test_prefixes_of_the_launcher_are_stripped_indented_ones_too() -> None:
    report = _report("launcher_prefix_2024")
    assert [row.size_bytes for row in report.rows] == [8, 32]
    assert (report.num_out_of_bounds, report.average_busbw_gbps) == (0, 92.3405)


def test_a_build_without_mpi_is_found_out() -> None:
    assert _report("separate_runs_2022").separate_runs


def test_a_failing_rank_is_quoted() -> None:
    report = _report("busy_devices_2026")
    assert report.failures == (
        "gpu-1-1: Test CUDA failure common.cu:1304 "
        "'CUDA-capable device(s) is/are busy or unavailable'",
        ".. gpu-1-1 pid 3617715: Test failure common.cu:1189",
    )
    assert not report.passed


def test_the_newest_output_becomes_a_link() -> None:
    reports = {"all_reduce": _report("all_reduce_2026")}
    link = link_of(reports, nodes=("a", "b"), num_ranks=2)  # type: ignore[arg-type]
    assert [(time.size_bytes, time.typical_us, time.fastest_us) for time in link.times] == [
        (8192, 35.15, 30.33),
        (65536, 67.93, 64.71),
    ]
    assert (link.backend, link.source, link.num_wrong) == ("nccl", "nccl-tests", 0)


def test_rows_of_no_bytes_are_no_link_times() -> None:
    link = link_of({"all_reduce": _report("zero_sizes_2023")}, nodes=("a",), num_ranks=2)
    assert [time.size_bytes for time in link.times] == [128]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("busy_devices_2026", "Test CUDA failure"), ("separate_runs_2022", "without MPI")],
)
def test_a_run_that_is_not_usable_says_why(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        link_of({"all_reduce": _report(name)}, nodes=("a",), num_ranks=2)
