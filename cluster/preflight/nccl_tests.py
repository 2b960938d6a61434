"""Runs NVIDIA's nccl-tests and parses their output.

Text of versions 2.0 to 2.19 and the JSON of 2.17.3 and later become one `BandwidthReport`, which
separates the content of the output from conclusions. The folder of the binaries is a setting, since
no package index contains them. The JSON contains the environment of the run with its secrets: only
the results are kept.

The text parser was written from the format; comments name the special cases.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eesd_dist.errors import ConfigError, EngineError

Collective = Literal[
    "all_gather", "all_reduce", "alltoall", "broadcast", "reduce", "reduce_scatter", "sendrecv"
]

WRONG_RESULTS_EXIT = 7
"""Exit status of nccl-tests for wrong results, and for a bandwidth below NCCL_TESTS_MIN_BW."""

EXIT_MEANINGS = {
    1: "internal error",
    2: "CUDA error",
    3: "NCCL error",
    4: "timeout",
    5: "not implemented, or a wrong number of GPUs",
    6: "wrong usage",
    WRONG_RESULTS_EXIT: "wrong results, or bandwidth below NCCL_TESTS_MIN_BW",
    255: "wrong arguments",
}


class NcclTestsError(EngineError):
    """nccl-tests failed, or printed output that cannot be parsed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One operation at one size."""

    time_us: float
    algbw_gbps: float
    """Gigabytes (not bits) per second: size over time."""
    busbw_gbps: float
    """The same, corrected for the number of times that a collective moves each byte."""
    num_wrong: int | None
    """None when the run did not check, or the operation cannot be checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthRow:
    """One line of the table."""

    size_bytes: int
    count: int
    dtype: str
    redop: str | None
    """None if the operation reduces nothing."""
    root: int | None
    """None if the operation has no root, and in old versions that do not print it."""
    out_of_place: Timing
    in_place: Timing | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One rank's GPU."""

    rank: int
    pid: int
    hostname: str
    index: int
    bus_id: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthReport:
    """One run."""

    devices: tuple[Device, ...]
    rows: tuple[BandwidthRow, ...]
    num_out_of_bounds: int | None
    """None when the run ended before it was printed."""
    average_busbw_gbps: float | None
    failures: tuple[str, ...]
    """Lines in which a rank reports a failure."""
    separate_runs: bool
    """The launcher started N separate runs instead of one group of N (a build without MPI)."""

    @property
    def passed(self) -> bool:
        """Complete, correct, and one group."""
        return (
            bool(self.rows)
            and self.num_out_of_bounds == 0
            and not self.failures
            and not self.separate_runs
        )

    def best_busbw_gbps(self) -> float:
        """Returns the largest bus bandwidth at any size."""
        return max((t.busbw_gbps for row in self.rows for t in _timings(row)), default=0.0)

    def latency_us(self, *, size_bytes: int) -> float:
        """Returns the out-of-place time at the smallest measured size of at least `size_bytes`."""
        fitting = [row for row in self.rows if row.size_bytes >= size_bytes]
        if not fitting:
            raise ConfigError(f"no row of {size_bytes} bytes or more: raise the largest size (-e)")
        return min(fitting, key=lambda row: row.size_bytes).out_of_place.time_us


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclTestsCommand:
    """One process for all GPUs of this node; needs no MPI and no ssh."""

    binaries: Path
    """Folder of `all_reduce_perf` and the other programs."""
    collective: Collective = "all_reduce"
    num_gpus: int = 1
    min_bytes: int = 8
    max_bytes: int = 256 * 2**20
    num_iterations: int = 20
    timeout_s: int = 120
    """Passed to nccl-tests; the deadline of the caller is twice that."""
    json_path: Path | None = None
    """Needs 2.17.3 or later. nccl-tests never overwrites a file: it appends `.0` instead."""

    def argv(self) -> list[str]:
        binary = self.binaries / f"{self.collective}_perf"
        sizes = ["-b", str(self.min_bytes), "-e", str(self.max_bytes), "-f", "2"]
        limits = ["-n", str(self.num_iterations), "-T", str(self.timeout_s)]
        output = [] if self.json_path is None else ["-J", str(self.json_path)]
        return [str(binary), "-g", str(self.num_gpus), *sizes, *limits, *output]

    def over_nodes(self, *, hosts: Sequence[str]) -> list[str]:
        """Returns the command for several nodes, by mpirun with a process per GPU; needs MPI."""
        ranks = self.num_gpus * len(hosts)
        slots = ",".join(f"{host}:{self.num_gpus}" for host in hosts)
        launcher = ["mpirun", "-np", str(ranks), "--host", slots, "--bind-to", "none"]
        passed_on = [word for name in _passed_on(os.environ) for word in ("-x", name)]
        own = self.argv()
        own[own.index("-g") + 1] = "1"
        return [*launcher, *passed_on, *own]


def run_nccl_tests(command: NcclTestsCommand) -> BandwidthReport:
    """Runs on this node and parses the output; wrong results are in the report, not raised."""
    argv = command.argv()
    if not Path(argv[0]).is_file():
        raise ConfigError(
            f"{argv[0]} does not exist: nccl-tests are in NVIDIA's PyTorch images or are built "
            "from source; name their folder, or use `python -m cluster.preflight.link_benchmark`"
        )
    deadline_s = 2 * command.timeout_s
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=deadline_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise NcclTestsError(f"{argv[0]} did not end within {deadline_s} s") from error
    if done.returncode not in (0, WRONG_RESULTS_EXIT):
        meaning = EXIT_MEANINGS.get(done.returncode, "unknown code")
        last = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise NcclTestsError(f"{argv[0]} exited {done.returncode} ({meaning}): {' / '.join(last)}")
    if command.json_path is not None:
        return parse_json(command.json_path.read_text())
    return parse_text(done.stdout)


_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LAUNCHER = re.compile(r"^\[\d+,\d+\]<std(?:out|err)>:\s?")
_TIMESTAMP = re.compile(r"\s+\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\s*$")
_DEVICE = re.compile(
    r"#?\s*Rank\s+(?P<rank>\d+)(?:\s+Group\s+\d+)?\s+Pid\s+(?P<pid>\d+)\s+on\s+(?P<host>\S+)\s+"
    r"device\s+(?P<index>\d+)\s+\[(?P<bus>[^\]]+)\]\s+(?P<name>.*\S)"
)
_OUT_OF_BOUNDS = re.compile(r"Out of bounds values\s*:\s*(\d+)")
_AVERAGE = re.compile(r"Avg bus bandwidth\s*:\s*(\S+)")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_FAILURE = re.compile(r"Test (?:NCCL |CUDA )?failure|Test timeout")
_HEADER = re.compile(r"#\s*nThread\s")


def parse_text(output: str) -> BandwidthReport:
    """Parses the output of a run, with or without NCCL's log lines and launcher prefixes."""
    lines = [_LAUNCHER.sub("", _ANSI.sub("", line)).rstrip() for line in output.splitlines()]
    devices = tuple(
        _device(match.groupdict()) for line in lines if (match := _DEVICE.match(line)) is not None
    )
    counts = [int(match[1]) for line in lines if (match := _OUT_OF_BOUNDS.search(line))]
    averages = [float(match[1]) for line in lines if (match := _AVERAGE.search(line))]
    num_headers = sum(_HEADER.match(line) is not None for line in lines)
    ranks = [device.rank for device in devices]
    return BandwidthReport(
        devices=devices,
        rows=tuple(row for line in lines if (row := _row(line)) is not None),
        num_out_of_bounds=sum(counts) if counts else None,
        average_busbw_gbps=averages[-1] if averages else None,
        failures=tuple(line.strip() for line in lines if _FAILURE.search(line)),
        separate_runs=num_headers > 1 and len(set(ranks)) < len(ranks),
    )


def _device(fields: dict[str, str]) -> Device:
    return Device(
        rank=int(fields["rank"]),
        pid=int(fields["pid"]),
        hostname=fields["host"],
        index=int(fields["index"]),
        bus_id=fields["bus"],
        name=fields["name"],
    )


def _row(line: str) -> BandwidthRow | None:
    """Parses `size count type [redop] [root] time algbw busbw wrong [time algbw busbw wrong]`.

    Returns None for any other line. Before 2.13 all_reduce had no root column and broadcast no
    redop; per-iteration statistics (-I 1) add four columns after each block of four.
    """
    words = _TIMESTAMP.sub("", line).split()
    if len(words) < 7 or not (words[0].isdigit() and words[1].isdigit() and words[2][0].isalpha()):
        return None
    rest = words[3:]
    redop = rest.pop(0) if rest[0][0].isalpha() and rest[0] != "N/A" else None
    if not all(word == "N/A" or _NUMBER.fullmatch(word) for word in rest):
        return None  # a log line that happens to begin with two numbers and a word
    # Blocks have four columns, so an extra column is the root.
    root = int(rest.pop(0)) if len(rest) % 4 == 1 else None
    if len(rest) not in (4, 8, 16):
        return None
    blocks = [_timing(rest[start : start + 4]) for start in range(0, len(rest), 4)]
    in_place = {1: None, 2: 1, 4: 2}[len(blocks)]
    return BandwidthRow(
        size_bytes=int(words[0]),
        count=int(words[1]),
        dtype=words[2],
        redop=None if redop == "none" else redop,
        root=None if root is None or root < 0 else root,
        out_of_place=blocks[0],
        in_place=None if in_place is None else blocks[in_place],
    )


def _timing(words: Sequence[str]) -> Timing:
    time_us, algbw, busbw, wrong = words
    # `0e+00` in old versions; N/A with -c 0, and always for sendrecv in place.
    return Timing(
        time_us=float(time_us),
        algbw_gbps=float(algbw),
        busbw_gbps=float(busbw),
        num_wrong=None if wrong == "N/A" else int(float(wrong)),
    )


def parse_json(text: str) -> BandwidthReport:
    """Parses the file that `-J` writes, versions 1 to 3 of its format."""
    try:
        content = json.loads(text)
        return _report_of(content)
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise NcclTestsError(f"not the JSON of nccl-tests: {error!r}") from error


# The values come from json.loads; each is converted before it is kept.
def _report_of(content: dict[str, Any]) -> BandwidthReport:
    ranks = [int(device["rank"]) for device in content["devices"]]
    bounds = content.get("out_of_bounds")
    average = content.get("average_bus_bandwidth")
    return BandwidthReport(
        devices=tuple(
            Device(
                rank=int(device["rank"]),
                pid=int(device["pid"]),
                hostname=str(device["hostname"]),
                index=int(device["device"]),
                bus_id=str(device["device_hex"]),
                name=str(device["device_info"]),
            )
            for device in content["devices"]
        ),
        rows=tuple(_row_of(entry) for entry in content["results"]),
        num_out_of_bounds=None if bounds is None else int(bounds["count"]),
        average_busbw_gbps=None if average is None else float(average["bandwidth"]),
        failures=tuple(str(error) for error in content.get("errors", [])),
        separate_runs=len(set(ranks)) < len(ranks),
    )


def _row_of(entry: dict[str, Any]) -> BandwidthRow:
    redop = str(entry.get("redop", "none"))
    root = int(entry.get("root", -1))
    in_place = entry.get("in_place")
    return BandwidthRow(
        size_bytes=int(entry["size"]),
        count=int(entry["count"]),
        dtype=str(entry["type"]),
        redop=None if redop == "none" else redop,
        root=None if root < 0 else root,
        out_of_place=_timing_of(entry["out_of_place"]),
        in_place=None if in_place is None else _timing_of(in_place),
    )


def _timing_of(entry: dict[str, Any]) -> Timing:
    wrong = entry.get("nwrong")
    return Timing(
        time_us=float(entry["time"]),
        algbw_gbps=float(entry["alg_bw"]),
        busbw_gbps=float(entry["bus_bw"]),
        num_wrong=None if wrong in (None, "N/A") else int(float(wrong)),
    )


def _timings(row: BandwidthRow) -> Iterable[Timing]:
    return (row.out_of_place,) if row.in_place is None else (row.out_of_place, row.in_place)


def _passed_on(environment: Iterable[str]) -> list[str]:
    """Returns the variables that must be the same on every rank."""
    return sorted(name for name in environment if name.startswith(("NCCL_", "LD_LIBRARY_PATH")))
