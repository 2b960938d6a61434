"""Groups of ranks with sums in CUDA graphs; ranks share a GPU where there is only one."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from eesd_dist.config import (
    CacheConfig,
    DType,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from eesd_dist.transport.authentication.key_store import StoreHost
from tests.gpu.conftest import Property
from tests.gpu.group_engines import run_engine, time_70b_pass
from tests.gpu.group_jobs import (
    die_before_a_replay,
    die_between_replays,
    die_during_a_replay,
    sums_in_graphs,
)
from tests.gpu.ranks import run_ranks

pytestmark = pytest.mark.gpu

_COMPILING_S = 60.0
"""Deadline between ranks that compile kernels."""
_CONTROL = "nvidia-cuda-mps-control"


@pytest.fixture(scope="module")
def side_by_side(
    device: torch.device, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, str]]:
    """Returns the environment in which kernels of ranks on one GPU run at once, by a daemon of its
    own (MPS). Without one they take turns, and a sum takes the time of several turns."""
    environment = {
        f"CUDA_MPS_{name}_DIRECTORY": str(tmp_path_factory.mktemp(name.lower()))
        for name in ("PIPE", "LOG")
    }
    control = partial(subprocess.run, env={**os.environ, **environment}, timeout=20.0, check=False)
    is_shared = device.type == "cuda" and torch.cuda.device_count() == 1
    if not is_shared or shutil.which(_CONTROL) is None or control([_CONTROL, "-d"]).returncode:
        yield {}
        return
    yield environment
    control([_CONTROL], input=b"quit\n")


@pytest.mark.parametrize(("size", "num_nodes"), [(2, 1), (4, 1), (4, 2)])
def test_sums_in_graphs_follow_the_rule(
    size: int,
    num_nodes: int,
    num_gpus: int,
    side_by_side: Mapping[str, str],
    record_property: Property,
) -> None:
    figures = run_ranks(
        sums_in_graphs,
        [f"cuda:{rank % num_gpus}" for rank in range(size)],
        num_nodes=num_nodes,
        environment=side_by_side,
        limit_s=90.0,
    )
    name = f"sums of {size} ranks on {num_nodes} nodes, {'MPS' if side_by_side else 'no MPS'}"
    record_property(name, figures[0])


@pytest.mark.parametrize(
    ("size", "num_nodes", "in_memory"),
    [(2, 1, True), (2, 1, False), (4, 2, True)],
    ids=["in memory", "NCCL", "nodes"],
)
def test_a_rank_that_dies_around_a_replay_is_noticed(
    size: int, num_nodes: int, in_memory: bool, num_gpus: int, record_property: Property
) -> None:
    devices = [f"cuda:{rank % num_gpus}" for rank in range(size)]
    jobs = (die_before_a_replay, die_during_a_replay, die_between_replays)
    with ThreadPoolExecutor(len(jobs)) as pool:
        ends = [
            pool.submit(
                run_ranks,
                job,
                devices,
                dying={size - 1},
                in_memory=in_memory,
                num_nodes=num_nodes,
            )
            for job in jobs
        ]
        for job, end in zip(jobs, ends, strict=True):
            record_property(job.__name__, end.result()[0])


@pytest.mark.parametrize(
    ("num_draft", "num_verify", "num_nodes", "dtype"),
    [(1, 2, 1, "float32"), (2, 2, 1, "bfloat16"), (2, 4, 2, "bfloat16")],
)
def test_texts_of_ranks_are_those_of_plain_decoding(
    num_draft: int,
    num_verify: int,
    num_nodes: int,
    dtype: DType,
    device: torch.device,
    is_small: bool,
    drafting_model: Path,
    side_by_side: Mapping[str, str],
    record_property: Property,
) -> None:
    """In float32 they are those of one process, too: sums of parts round otherwise than a product,
    which in bfloat16 may decide between two tokens."""
    num_requests = 3 if is_small else 16
    config = EngineConfig(
        model=ModelConfig(
            path=drafting_model, dtype=dtype, device="cpu" if device.type == "cpu" else "cuda"
        ),
        cache=CacheConfig(page_size=32, num_pages=8 * num_requests),
        parallel=ParallelConfig(
            draft_tensor_parallel_size=num_draft, verify_tensor_parallel_size=num_verify
        ),
        scheduler=SchedulerConfig(max_running=num_requests, overlap=False),
        speculation=SpeculationConfig(controller="fixed", fixed_length=3, learn_costs=False),
    )
    host = StoreHost(address="127.0.0.1")
    on_device = "cpu" if device.type == "cpu" else "cpu<-cuda:0"
    ends = run_ranks(
        partial(
            run_engine,
            config=config,
            at=host.at,
            num_requests=num_requests,
            num_tokens=6 if is_small else 64,
            num_nodes=num_nodes,
        ),
        [on_device] * (num_draft + num_verify),
        environment=side_by_side,
        limit_s=240.0,
    )
    name = f"draft {num_draft} + verify {num_verify} on {num_nodes} nodes, {dtype}"
    record_property(name, ends[0])
    record_property("ranks", ends[1:])
    num_compared = ends[0]["tokens"]
    assert isinstance(num_compared, int)
    assert is_small or num_compared > 1_000
    assert dtype == "bfloat16" or ends[0]["texts unlike one process's"] == 0
    grouped = [end for end in ends if "sums" in end]
    assert len(grouped) == num_verify + (num_draft if num_draft > 1 else 0)
    assert all(end["sums"] for end in grouped)
    if device.type == "cuda":
        assert all(end["in memory"] and end["replays"] for end in grouped)


@pytest.mark.parametrize("in_memory", [True, False], ids=["in memory", "NCCL"])
def test_a_pass_of_llama_70b_is_queued_as_a_graph(
    in_memory: bool,
    device: torch.device,
    is_small: bool,
    side_by_side: Mapping[str, str],
    record_property: Property,
) -> None:
    """Both ranks are on one GPU: a pass takes it twice the time of one rank. A graph without memory
    of the ranks is in pieces."""
    num_gpus = 1 if is_small else torch.cuda.device_count()
    job = partial(
        time_70b_pass,
        num_layers=2 if is_small else 80,
        num_stored=1 if is_small else 4,
        divisor=8 if is_small else 1,
    )
    devices = ["cpu"] * 2 if is_small else [f"cuda:{rank % num_gpus}" for rank in range(2)]
    figures, _ = run_ranks(
        job,
        devices,
        in_memory=in_memory,
        environment=side_by_side,
        limit_s=120.0,
        timeout_s=_COMPILING_S,
    )
    record_property("70B shape, 2 ranks, ms to queue and in all", figures)
    if is_small:
        return
    for rows in ("1 x 5", "8 x 5", "64 x 5"):
        graph, kernels = (figures[f"sums, {path}, {rows}"] for path in ("graph", "kernels"))
        assert isinstance(graph, tuple)
        assert isinstance(kernels, tuple)
        assert graph[0] < kernels[0] / (3 if in_memory else 1), (
            f"queueing a graph takes {graph[0]} ms, {rows}"
        )
