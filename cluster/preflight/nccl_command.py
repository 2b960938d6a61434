"""Runs NVIDIA's nccl-tests on this node, or over several by mpirun.

The folder of the binaries is a setting (`--nccl-tests`, or EESD_NCCL_TESTS on each node), since no
package index contains them.
"""

import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster.preflight.nccl_tests import BandwidthReport, NcclTestsError, parse_json, parse_text
from eesd_dist.errors import ConfigError

Collective = Literal[
    "all_gather", "all_reduce", "alltoall", "broadcast", "reduce", "reduce_scatter", "sendrecv"
]

FOLDER_VARIABLE = "EESD_NCCL_TESTS"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclTestsCommand:
    """Command of one process for all GPUs of this node; needs no MPI and no ssh."""

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

    def binary(self, *, mpi: bool = False) -> Path:
        """Returns the program; NVIDIA's images have a second one that is built with MPI."""
        with_mpi = self.binaries / f"{self.collective}_perf_mpi"
        return with_mpi if mpi and with_mpi.is_file() else self.binaries / f"{self.collective}_perf"

    def argv(self) -> list[str]:
        sizes = ["-b", str(self.min_bytes), "-e", str(self.max_bytes), "-f", "2"]
        limits = ["-n", str(self.num_iterations), "-T", str(self.timeout_s)]
        output = [] if self.json_path is None else ["-J", str(self.json_path)]
        return [str(self.binary()), "-g", str(self.num_gpus), *sizes, *limits, *output]

    def over_nodes(self, *, hosts: Sequence[str]) -> list[str]:
        """Returns the command for several nodes, by mpirun with a process per GPU; needs MPI."""
        ranks = self.num_gpus * len(hosts)
        slots = ",".join(f"{host}:{self.num_gpus}" for host in hosts)
        launcher = ["mpirun", "-np", str(ranks), "--host", slots, "--bind-to", "none"]
        passed_on = [word for name in _passed_on(os.environ) for word in ("-x", name)]
        own = self.argv()
        own[0] = str(self.binary(mpi=True))
        own[own.index("-g") + 1] = "1"
        return [*launcher, *passed_on, *own]


def find_binaries(option: Path | None) -> Path | None:
    """Returns the folder of nccl-tests on this node: the given one, or that of EESD_NCCL_TESTS.

    None if that folder has none of them. Raises ConfigError if the given one has none.
    """
    environment_folder = os.environ.get(FOLDER_VARIABLE)
    folder = option or (Path(environment_folder) if environment_folder else None)
    if folder is None or (folder / "all_reduce_perf").is_file():
        return folder
    if option is not None:
        raise ConfigError(_missing(folder / "all_reduce_perf"))
    return None


def run_nccl_tests(command: NcclTestsCommand, *, hosts: Sequence[str] = ()) -> BandwidthReport:
    """Runs on this node, or on `hosts` by mpirun, and parses the output.

    Wrong results are in the report, not raised. Raises ConfigError without binaries, and
    NcclTestsError for a run that failed.
    """
    argv = command.over_nodes(hosts=hosts) if hosts else command.argv()
    binary = command.binary(mpi=bool(hosts))
    if not binary.is_file():
        raise ConfigError(_missing(binary))
    deadline_s = 2 * command.timeout_s
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=deadline_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise NcclTestsError(f"{argv[0]} did not end within {deadline_s} s") from error
    except FileNotFoundError as error:
        raise ConfigError(f"{argv[0]} is not on the PATH: install Open MPI on this node") from error
    except OSError as error:  # no right to run it, another processor's, no memory
        raise ConfigError(f"{argv[0]} cannot run here: {error.strerror}") from error
    if done.returncode not in (0, WRONG_RESULTS_EXIT):
        meaning = EXIT_MEANINGS.get(done.returncode, "unknown code")
        last = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise NcclTestsError(f"{argv[0]} exited {done.returncode} ({meaning}): {' / '.join(last)}")
    if command.json_path is not None:
        return parse_json(command.json_path.read_text())
    return parse_text(done.stdout)


def _missing(binary: Path) -> str:
    return (
        f"{binary} does not exist: nccl-tests are in NVIDIA's PyTorch images or are built from "
        f"source; name their folder (--nccl-tests, {FOLDER_VARIABLE}), or use "
        "`python -m cluster.preflight.link_benchmark`"
    )


def _passed_on(environment: Iterable[str]) -> list[str]:
    """Returns the variables that must be the same on every rank."""
    return sorted(name for name in environment if name.startswith(("NCCL_", "LD_LIBRARY_PATH")))
