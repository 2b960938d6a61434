"""The samples are written by hand in the formats of the given versions; real ones are in
`test_nccl_outputs`."""

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.preflight.nccl_command import NcclTestsCommand, find_binaries, run_nccl_tests
from cluster.preflight.nccl_tests import NcclTestsError, parse_json, parse_text
from cluster.preflight.node_agent import NodeAgent
from eesd_dist.errors import ConfigError

# 2.16 and later: redop and root columns, #wrong; two nodes.
NEW = """\
# nccl-tests version 2.16.7 nccl-headers=22707 nccl-library=22707
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 1 minBytes 8 maxBytes 1048576 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1
#
# Using devices
#  Rank  0 Group  0 Pid   1887 on   node-1 device  0 [0000:8d:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   1901 on   node-2 device  3 [0x8d] NVIDIA H100 80GB HBM3
#
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
           8             2     float     sum      -1    24.11    0.00    0.00       0    23.90    0.00    0.00       0
node-1:1887:1887 [0] NCCL INFO comm 0x55 rank 0 nranks 2 - Init COMPLETE
     1048576        262144     float     sum      -1    80.50   13.03   13.03       0    79.10   13.26   13.26       0
  8589934592    2147483648     float     sum      -1    63896  134.44  134.44       0    63959  134.30  134.30       0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 49.1717
#
# Collective test concluded: all_reduce_perf
"""  # noqa: E501

HEADER = "# nThread 1 nGpus 1 minBytes 8 maxBytes 8\n"
FOOTER = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 0\n"


def _with_rows(*rows: str) -> str:
    return HEADER + "".join(row + "\n" for row in rows) + FOOTER


def test_devices_rows_and_footer_are_read_between_log_lines() -> None:
    report = parse_text(NEW)
    assert [(d.rank, d.hostname, d.index, d.bus_id) for d in report.devices] == [
        (0, "node-1", 0, "0000:8d:00"),
        (1, "node-2", 3, "0x8d"),
    ]
    assert [row.size_bytes for row in report.rows] == [8, 1_048_576, 8_589_934_592]
    assert report.rows[1].out_of_place.time_us == 80.5
    assert report.rows[1].in_place is not None
    assert report.rows[1].in_place.busbw_gbps == 13.26
    assert report.rows[1].redop == "sum"
    assert report.rows[1].root is None
    assert report.average_busbw_gbps == 49.1717
    assert report.passed


@pytest.mark.parametrize(
    ("line", "redop", "root", "num_wrong"),
    [
        # before 2.13: no root column, the error is a float
        ("8 2 float sum 30.1 0.00 0.00 0e+00 29.9 0.00 0.00 0e+00", "sum", None, 0),
        # before 2.13, broadcast: root and no redop; -c 0 does not check
        ("8 2 float 3 30.1 0.00 0.00 N/A 29.9 0.00 0.00 N/A", None, 3, None),
        # broadcast since: redop none
        ("8 8 uint8 none 0 30.1 0.00 0.00 0 29.9 0.00 0.00 0", None, 0, 0),
        # sendrecv: never checked in place
        ("8 2 float none -1 30.1 0.00 0.00 0 29.9 0.00 0.00 N/A", None, None, 0),
        # out of place only
        ("8 2 half avg -1 30.1 0.00 0.00 5", "avg", None, 5),
    ],
)
def test_every_versions_columns_are_told_apart(
    line: str, redop: str | None, root: int | None, num_wrong: int | None
) -> None:
    (row,) = parse_text(_with_rows(line)).rows
    assert (row.redop, row.root, row.out_of_place.num_wrong) == (redop, root, num_wrong)
    assert row.out_of_place.time_us == 30.1


def test_statistics_of_single_iterations_are_stepped_over() -> None:
    out = "30.1 0.10 0.20 0  28 31 30 1"
    line = f"8 2 float sum -1 {out} 29.9 0.30 0.40 0 27 30 29 1"
    (row,) = parse_text(_with_rows(line)).rows
    assert row.in_place is not None
    assert (row.out_of_place.busbw_gbps, row.in_place.busbw_gbps) == (0.2, 0.4)


def test_launcher_prefixes_colours_and_timestamps_are_stripped() -> None:
    row = "8 2 float sum -1 30.1 0.00 0.00 0 29.9 0.00 0.00 0 2026-03-01 10:11:12"
    plain = parse_text(_with_rows(row))
    dressed = "\n".join(f"[1,0]<stdout>:\x1b[32m{line}" for line in _with_rows(row).splitlines())
    assert parse_text(dressed).rows == plain.rows
    assert len(plain.rows) == 1


def test_a_log_line_that_begins_like_a_row_is_none() -> None:
    assert parse_text("8 2 workers joined after 3 tries on node-1\n").rows == ()


def test_wrong_values_do_not_pass() -> None:
    text = NEW.replace("values : 0 OK", "values : 50 FAILED")
    report = parse_text(text)
    assert report.num_out_of_bounds == 50
    assert not report.passed


def test_a_run_that_stopped_half_way_does_not_pass() -> None:
    report = parse_text(NEW.partition("# Out of bounds")[0])
    assert report.num_out_of_bounds is None
    assert not report.passed


def test_a_failing_rank_is_quoted() -> None:
    line = "node-1: Test NCCL failure all_reduce.cu:44 'unhandled system error / timed out'"
    report = parse_text(NEW + line + "\n")
    assert report.failures == (line,)
    assert not report.passed


def test_one_gpu_has_no_bus_bandwidth_and_passes() -> None:
    report = parse_text(_with_rows("8 2 float sum -1 30.1 0.00 0.00 0 29.9 0.00 0.00 0"))
    assert report.average_busbw_gbps == 0.0
    assert report.passed


def test_a_build_without_mpi_under_mpirun_is_found_out() -> None:
    device = "#  Rank  0 Pid {pid} on node-1 device  0 [0x8d] NVIDIA H100\n"
    row = "8 2 float sum -1 30.1 0.00 0.00 0 29.9 0.00 0.00 0\n"
    once = HEADER + device + row + FOOTER
    report = parse_text(once.format(pid=1) + once.format(pid=2))
    assert report.separate_runs
    assert not report.passed


def _json_report() -> dict[str, object]:
    timing = {"time": 24.1, "alg_bw": 0.5, "bus_bw": 0.9, "nwrong": 0}
    return {
        "version": 3,
        "env": ["SECRET=hunter2"],
        "devices": [
            {
                "rank": 0,
                "group": 0,
                "pid": 7,
                "hostname": "node-1",
                "device": 0,
                "device_hex": "0x8d",
                "device_info": "NVIDIA H100",
            }
        ],
        "results": [
            {
                "size": 8,
                "count": 2,
                "type": "float",
                "redop": "sum",
                "root": -1,
                "out_of_place": timing,
                "in_place": {**timing, "nwrong": "N/A"},
            }
        ],
        "out_of_bounds": {"count": 0, "okay": "true"},
        "average_bus_bandwidth": {"bandwidth": 0.9, "okay": "unchecked"},
        "errors": [],
    }


def test_json_gives_the_same_kind_of_report_without_the_environment() -> None:
    report = parse_json(json.dumps(_json_report()))
    assert report.passed
    assert report.average_busbw_gbps == 0.9
    assert report.rows[0].out_of_place.num_wrong == 0
    assert report.rows[0].in_place is not None
    assert report.rows[0].in_place.num_wrong is None
    assert "hunter2" not in repr(report)


@pytest.mark.parametrize("text", ["", "[]", '{"devices": []}'])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(NcclTestsError, match="not the JSON"):
        parse_json(text)


def _fake_binary(folder: Path, body: str) -> None:
    binary = folder / "all_reduce_perf"
    binary.write_text(f"#!/bin/sh\n{body}\n")
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)


def test_a_run_gives_the_report_it_printed(tmp_path: Path) -> None:
    (tmp_path / "out").write_text(NEW)
    _fake_binary(tmp_path, f'cat {tmp_path}/out; echo "$@" > {tmp_path}/argv')
    report = run_nccl_tests(NcclTestsCommand(binaries=tmp_path, num_gpus=4, max_bytes=1024))
    assert report == parse_text(NEW)
    assert (tmp_path / "argv").read_text().split()[:6] == ["-g", "4", "-b", "8", "-e", "1024"]


def test_wrong_results_come_back_as_a_report(tmp_path: Path) -> None:
    (tmp_path / "out").write_text(NEW.replace("values : 0 OK", "values : 1 FAILED"))
    _fake_binary(tmp_path, f"cat {tmp_path}/out; exit 7")
    assert not run_nccl_tests(NcclTestsCommand(binaries=tmp_path)).passed


def test_a_failed_run_says_what_its_code_means(tmp_path: Path) -> None:
    _fake_binary(tmp_path, "echo 'no CUDA-capable device' >&2; exit 2")
    with pytest.raises(NcclTestsError, match=r"exited 2 \(CUDA error\): no CUDA-capable device"):
        run_nccl_tests(NcclTestsCommand(binaries=tmp_path))


def test_missing_binaries_are_the_operators_to_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="all_reduce_perf does not exist"):
        run_nccl_tests(NcclTestsCommand(binaries=tmp_path))


def test_a_binary_that_the_machine_refuses_to_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "all_reduce_perf").write_bytes(b"\x7fELF of another processor")
    (tmp_path / "all_reduce_perf").chmod(0o755)
    with pytest.raises(ConfigError, match="all_reduce_perf cannot run here: Exec format error"):
        run_nccl_tests(NcclTestsCommand(binaries=tmp_path))


def test_over_nodes_there_is_one_process_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    command = NcclTestsCommand(binaries=Path("/opt/nccl-tests"), num_gpus=8)
    argv = command.over_nodes(hosts=["a", "b"])
    assert argv[:5] == ["mpirun", "-np", "16", "--host", "a:8,b:8"]
    assert argv[argv.index("NCCL_SOCKET_IFNAME") - 1] == "-x"
    assert argv[argv.index("-g") + 1] == "1"


def test_json_output_is_asked_for_by_its_path() -> None:
    command = NcclTestsCommand(binaries=Path("/b"))
    assert "-J" not in command.argv()
    assert replace(command, json_path=Path("/tmp/o.json")).argv()[-2:] == ["-J", "/tmp/o.json"]


def test_the_folder_is_the_given_one_or_that_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EESD_NCCL_TESTS", raising=False)
    assert find_binaries(None) is None
    monkeypatch.setenv("EESD_NCCL_TESTS", str(tmp_path))
    assert find_binaries(None) is None  # an image without them names the folder too
    _fake_binary(tmp_path, "exit 0")
    assert find_binaries(None) == tmp_path
    with pytest.raises(ConfigError, match="all_reduce_perf does not exist"):
        find_binaries(tmp_path / "empty")


def test_a_large_number_of_wrong_values_is_read() -> None:
    line = "4194304 1048576 float sum -1 30.1 0.00 0.00 1.04858e+06 29.9 0.00 0.00 0"
    (row,) = parse_text(_with_rows(line)).rows
    assert row.out_of_place.num_wrong == 1_048_580


def test_a_node_runs_its_binaries_and_returns_the_report(tmp_path: Path) -> None:
    (tmp_path / "out").write_text(NEW)
    _fake_binary(tmp_path, f'cat {tmp_path}/out; echo "$@" > {tmp_path}/argv')
    report = NodeAgent().nccl_tests(tmp_path, "all_reduce", 4, [])
    assert report == parse_text(NEW)
    assert (tmp_path / "argv").read_text().split()[:2] == ["-g", "4"]


def test_between_nodes_the_build_with_mpi_is_preferred_and_mpirun_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_binary(tmp_path, "exit 0")
    command = NcclTestsCommand(binaries=tmp_path, num_gpus=2)
    assert f"{tmp_path}/all_reduce_perf" in command.over_nodes(hosts=["a", "b"])
    (tmp_path / "all_reduce_perf").rename(tmp_path / "all_reduce_perf_mpi")
    assert f"{tmp_path}/all_reduce_perf_mpi" in command.over_nodes(hosts=["a", "b"])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="mpirun is not on the PATH"):
        run_nccl_tests(command, hosts=["a", "b"])
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!/bin/sh\n/bin/cat {tmp_path}/out\n")
    mpirun.chmod(0o755)
    (tmp_path / "out").write_text(NEW)
    assert run_nccl_tests(command, hosts=["a", "b"]) == parse_text(NEW)
