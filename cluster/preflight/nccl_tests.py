"""Parses the output of NVIDIA's nccl-tests.

Text of versions 2.0 to 2.19 and the JSON of 2.17.3 and later become one `BandwidthReport`, which
separates the content of the output from conclusions. The JSON contains the environment of the run
with its secrets: only the results are kept. `nccl_command` runs them.

The text parser was written from the format and is tested on public outputs from 2020 to 2026;
comments name the special cases.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eesd_dist.errors import EngineError


class NcclTestsError(EngineError):
    """nccl-tests failed, or printed output that cannot be parsed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times of an operation at one size."""

    time_us: float
    algbw_gbps: float
    """Gigabytes (not bits) per second: size over time."""
    busbw_gbps: float
    """The same, corrected for the number of times that a collective moves each byte."""
    num_wrong: int | None
    """None when the run did not check, when the operation cannot be checked, and when an old
    version (before 2.13) prints the largest deviation instead of a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthRow:
    """Line of the table."""

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
    """GPU of one rank."""

    rank: int
    pid: int
    hostname: str
    index: int
    bus_id: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthReport:
    """Output of one run."""

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


_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LAUNCHER = re.compile(r"^\s*(?:\[\d+,\d+\]<std(?:out|err)>:\s?|\d+: )")
"""Prefixes of `mpirun --tag-output` and `srun --label`."""
_TIMESTAMP = re.compile(r"\s+\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\s*$")
_DEVICE = re.compile(
    r"#?\s*Rank\s+(?P<rank>\d+)(?:\s+Group\s+\d+)?\s+Pid\s+(?P<pid>\d+)\s+on\s+(?P<host>\S+)\s+"
    r"device\s+(?P<index>\d+)\s+\[(?P<bus>[^\]]+)\]\s+(?P<name>.*\S)"
)
_OUT_OF_BOUNDS = re.compile(r"Out of bounds values\s*:\s*(\d+)")
_AVERAGE = re.compile(r"Avg bus bandwidth\s*:\s*(\S+)")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_FAILURE = re.compile(r"Test (?:NCCL |CUDA )?failure|Test timeout")
_HEADER = re.compile(r"#?\s*nThread\s")
_DEVIATION = re.compile(r"\de[+-]\d\d")


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
    columns = words[3:]
    redop = columns.pop(0) if columns[0][0].isalpha() and columns[0] != "N/A" else None
    if not all(word == "N/A" or _NUMBER.fullmatch(word) for word in columns):
        return None  # a log line that happens to begin with two numbers and a word
    # Blocks have four columns, so an extra column is the root.
    root = int(columns.pop(0)) if len(columns) % 4 == 1 else None
    if len(columns) not in (4, 8, 16):
        return None
    blocks = [_timing(columns[start : start + 4]) for start in range(0, len(columns), 4)]
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
    return Timing(
        time_us=float(time_us),
        algbw_gbps=float(algbw),
        busbw_gbps=float(busbw),
        num_wrong=_num_wrong(wrong),
    )


def _num_wrong(word: str) -> int | None:
    """Returns the number; N/A with -c 0, and always for sendrecv in place.

    Old versions print a deviation as `%5.0e`: `0e+00` is none wrong, `2e-07` is rounding and
    `1e+00` an error of one, both in an unknown number of values. Later ones print a large number
    as `1.04858e+06`.
    """
    if word == "N/A" or (_DEVIATION.fullmatch(word) and float(word)):
        return None
    return int(float(word))


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
