"""Measures the links between ranks, where nccl-tests cannot run.

    python -m cluster.preflight.link_benchmark --ranks 2     # processes of this machine
    torchrun --nnodes 2 ... -m cluster.preflight.link_benchmark     # one process a node

send/recv is a ping-pong, of which half the round trip is reported; broadcast is sent there and back
too, since a root may return before its message has arrived; all_reduce is timed as in the model
layers, one call at a time. Rows have the columns of nccl-tests, so that one parser reads both.
`eesd preflight` runs the same between nodes (`links.runs`); the figures are inputs of `eesd plan`.
"""

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from cluster.link_figures import Operation

OPERATIONS: tuple[Operation, ...] = ("sendrecv", "broadcast", "all_reduce")
# One decode row of a small model, one of a 5120-wide one in float32, and eight of those.
DEFAULT_SIZES = (4 * 2**10, 20 * 2**10, 160 * 2**10)
NUM_WARM_UP = 4
MIN_ITERATIONS = 3
ROW_TIME_S = 0.25
"""Time for one operation at one size, about; MIN_ITERATIONS calls take as long as they take."""
SPAWN_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRow:
    """An operation at one size, timed on rank 0."""

    operation: Operation
    size_bytes: int
    num_ranks: int
    median_us: float
    fastest_us: float
    """Time that the link can reach: unlike the median, not changed by a busy host."""
    p99_us: float
    num_wrong: int
    """Elements with a wrong value."""

    @property
    def algbw_gbps(self) -> float:
        return self.size_bytes / (self.median_us * 1e3)

    @property
    def busbw_gbps(self) -> float:
        """Bus bandwidth by the convention of nccl-tests: an all-reduce moves each byte 2(n-1)/n
        times."""
        factor = 2 * (self.num_ranks - 1) / self.num_ranks if self.operation == "all_reduce" else 1
        return self.algbw_gbps * factor


def measure_links(
    *, sizes: Sequence[int] = DEFAULT_SIZES, num_iterations: int = 50
) -> list[LinkRow]:
    """Times every operation within the default process group; call it on every rank.

    Use only the rows of rank 0: the other ranks wait for it.
    """
    return [
        _measure(operation, size_bytes=size, num_iterations=num_iterations)
        for operation in OPERATIONS
        for size in sizes
    ]


def run_local(
    *,
    num_ranks: int = 2,
    sizes: Sequence[int] = DEFAULT_SIZES,
    num_iterations: int = 50,
    timeout_s: float = SPAWN_TIMEOUT_S,
) -> list[LinkRow]:
    """Measures between `num_ranks` processes of this machine, over Gloo."""
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue[list[LinkRow]] = context.Queue()
    port = _free_port()
    processes = [
        context.Process(
            target=_local_rank,
            args=(rank, num_ranks, port, tuple(sizes), num_iterations, timeout_s, answers),
            daemon=True,
        )
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    try:
        return answers.get(timeout=timeout_s)
    finally:
        for process in processes:
            process.join(timeout=5.0)
            if process.is_alive():
                process.kill()
                process.join()


def render(rows: Sequence[LinkRow]) -> str:
    """Returns a table with the columns of nccl-tests, one block for each operation."""
    blocks = [
        _block([row for row in rows if row.operation == operation]) for operation in OPERATIONS
    ]
    wrong = sum(row.num_wrong for row in rows)
    average = statistics.fmean(row.busbw_gbps for row in rows)
    footer = [
        f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}",
        f"# Avg bus bandwidth    : {average:.5f}",
    ]
    return "\n".join([*(line for block in blocks for line in block), *footer])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cluster.preflight.link_benchmark", description=__doc__
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes, when not under torchrun")
    parser.add_argument("--bytes", type=int, nargs="+", default=list(DEFAULT_SIZES))
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    options = parser.parse_args(argv)
    if "RANK" in os.environ:
        rows = _torchrun_rank(options)
    else:
        rows = run_local(
            num_ranks=options.ranks, sizes=options.bytes, num_iterations=options.iterations
        )
    if rows:
        sys.stdout.write(render(rows) + "\n")
    return int(any(row.num_wrong for row in rows))


def _torchrun_rank(options: argparse.Namespace) -> list[LinkRow]:
    """Runs as a rank of torchrun, which sets rank and address in the environment."""
    if options.backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(options.backend, timeout=timedelta(seconds=SPAWN_TIMEOUT_S))
    try:
        rows = measure_links(sizes=options.bytes, num_iterations=options.iterations)
        return rows if dist.get_rank() == 0 else []
    finally:
        dist.destroy_process_group()


def _local_rank(
    rank: int,
    num_ranks: int,
    port: int,
    sizes: tuple[int, ...],
    num_iterations: int,
    timeout_s: float,
    answers: "multiprocessing.Queue[list[LinkRow]]",
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        rows = measure_links(sizes=sizes, num_iterations=num_iterations)
        if rank == 0:
            answers.put(rows)
    finally:
        dist.destroy_process_group()


def _measure(operation: Operation, *, size_bytes: int, num_iterations: int) -> LinkRow:
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    x = torch.empty(max(1, size_bytes // 4), dtype=torch.float32, device=device)
    once = _CALLS[operation]
    once(x)  # connects
    num_iterations = _affordable(num_iterations, _timed_us(once, x), device=device)
    for _ in range(min(NUM_WARM_UP, num_iterations)):
        once(x)
    times_us = sorted(_timed_us(once, x) for _ in range(num_iterations))
    return LinkRow(
        operation=operation,
        size_bytes=4 * x.numel(),
        num_ranks=dist.get_world_size(),
        median_us=statistics.median(times_us),
        fastest_us=times_us[0],
        p99_us=times_us[min(num_iterations - 1, round(0.99 * num_iterations))],
        num_wrong=_num_wrong(operation, x),
    )


def _affordable(num_iterations: int, call_us: float, *, device: str) -> int:
    """Returns how many calls fit into the time of one row, the same number on all ranks: a slow
    link is measured by fewer."""
    fitting = max(MIN_ITERATIONS, int(ROW_TIME_S * 1e6 / max(call_us, 1.0)))
    agreed = torch.tensor([min(num_iterations, fitting)], device=device)
    dist.broadcast(agreed, src=0)
    return int(agreed.item())


def _timed_us(once: Callable[[Tensor], float], x: Tensor) -> float:
    dist.barrier()
    _settle(x)
    begin = time.perf_counter()
    share = once(x)
    _settle(x)
    return (time.perf_counter() - begin) * 1e6 * share


def _settle(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def _all_reduce(x: Tensor) -> float:
    """Sums rank + 1 over all ranks; returns the share of the time that counts."""
    x.fill_(dist.get_rank() + 1)
    dist.all_reduce(x)
    return 1.0


def _ping_pong(x: Tensor) -> float:
    """Sends ones from rank 0 to the last rank, which returns them doubled."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank == 0:
        x.fill_(1.0)
        dist.send(x, dst=last)
        dist.recv(x, src=last)
    elif rank == last:
        dist.recv(x, src=0)
        x.mul_(2.0)
        dist.send(x, dst=0)
    return 0.5


def _broadcast(x: Tensor) -> float:
    """Sends ones from rank 0 to all ranks, and them doubled from the last rank to all."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    x.fill_(1.0 if rank == 0 else 0.0)
    dist.broadcast(x, src=0)
    if rank == last:
        x.mul_(2.0)
    dist.broadcast(x, src=last)
    return 0.5


_CALLS: dict[Operation, Callable[[Tensor], float]] = {
    "sendrecv": _ping_pong,
    "broadcast": _broadcast,
    "all_reduce": _all_reduce,
}


def _num_wrong(operation: Operation, x: Tensor) -> int:
    ranks = dist.get_world_size()
    if operation == "sendrecv" and dist.get_rank() not in (0, ranks - 1):
        return 0
    expected = ranks * (ranks + 1) / 2 if operation == "all_reduce" else 2.0
    return int((x != expected).sum().item())


def _block(rows: Sequence[LinkRow]) -> list[str]:
    if not rows:
        return []
    title = f"# {rows[0].operation}, {rows[0].num_ranks} ranks, median times"
    columns = (
        f"#{'size':>11}{'count':>12}{'type':>8}{'redop':>8}{'root':>6}"
        f"{'time(us)':>12}{'algbw':>9}{'busbw':>9}{'#wrong':>8}"
    )
    return [title, columns, *(_line(row) for row in rows)]


def _line(row: LinkRow) -> str:
    redop = "sum" if row.operation == "all_reduce" else "none"
    root = 0 if row.operation == "broadcast" else -1
    return (
        f"{row.size_bytes:>12}{row.size_bytes // 4:>12}{'float':>8}{redop:>8}{root:>6}"
        f"{row.median_us:>12.1f}{row.algbw_gbps:>9.3f}{row.busbw_gbps:>9.3f}{row.num_wrong:>8}"
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    raise SystemExit(main())
