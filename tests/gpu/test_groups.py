"""Groups of ranks with sums in CUDA graphs; ranks share a GPU where there is only one."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.gpu.conftest import Property
from tests.gpu.group_jobs import (
    die_before_a_replay,
    die_between_replays,
    die_during_a_replay,
    sums_in_graphs,
)
from tests.gpu.ranks import run_ranks

pytestmark = pytest.mark.gpu

_CONTROL = "nvidia-cuda-mps-control"


@pytest.fixture(scope="module")
def side_by_side(
    num_gpus: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, str]]:
    """Returns the environment in which kernels of ranks on one GPU run at once, by a daemon of its
    own (MPS). Without one they take turns, and a sum takes the time of several turns."""
    environment = {
        f"CUDA_MPS_{name}_DIRECTORY": str(tmp_path_factory.mktemp(name.lower()))
        for name in ("PIPE", "LOG")
    }
    control = partial(subprocess.run, env={**os.environ, **environment}, timeout=20.0, check=False)
    if num_gpus > 1 or shutil.which(_CONTROL) is None or control([_CONTROL, "-d"]).returncode:
        yield {}
        return
    yield environment
    control([_CONTROL], input=b"quit\n")


@pytest.mark.parametrize("size", [2, 4])
def test_sums_in_graphs_follow_the_rule(
    size: int, num_gpus: int, side_by_side: Mapping[str, str], record_property: Property
) -> None:
    figures = run_ranks(
        sums_in_graphs,
        [f"cuda:{rank % num_gpus}" for rank in range(size)],
        environment=side_by_side,
        limit_s=60.0,
    )
    record_property(f"sums of {size} ranks, {'MPS' if side_by_side else 'no MPS'}", figures[0])


def test_a_rank_that_dies_around_a_replay_is_noticed(
    num_gpus: int, record_property: Property
) -> None:
    devices = ["cuda:0", f"cuda:{1 % num_gpus}"]
    jobs = (die_before_a_replay, die_during_a_replay, die_between_replays)
    with ThreadPoolExecutor(len(jobs)) as pool:
        ends = [pool.submit(run_ranks, job, devices, dying={1}) for job in jobs]
        for job, end in zip(jobs, ends, strict=True):
            record_property(job.__name__, end.result()[0])
