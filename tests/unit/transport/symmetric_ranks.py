"""Ranks with memory of the host, in processes that run the kernels in Triton's interpreter."""

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from eesd_dist.transport.peer_memory import PeerMemory
from eesd_dist.transport.symmetric import sums
from eesd_dist.transport.symmetric.kernel import DATA
from eesd_dist.transport.symmetric.sums import SymmetricSums

CAPACITY = 4096
"""Bytes of a launch."""
Job = Callable[[SymmetricSums, int, int], None]


class HostMemory(PeerMemory):
    """Tensors that processes share."""

    def __init__(self, memories: Sequence[Tensor]) -> None:
        self.addresses = tuple(memory.data_ptr() for memory in memories)
        self._parts = memories


def host_memory(size: int) -> list[Tensor]:
    return [torch.zeros(DATA + 4 * CAPACITY, dtype=torch.uint8) for _ in range(size)]


def sums_of(memories: Sequence[Tensor], rank: int) -> SymmetricSums:
    return SymmetricSums(
        HostMemory(memories), rank=rank, device=torch.device("cpu"), capacity=CAPACITY
    )


def run_symmetric(job: Job, size: int, *, limit_s: float = 60.0) -> None:
    """Runs a process per rank; raises AssertionError with the first rank's error."""
    spawned = multiprocessing.get_context("spawn")
    memories = [memory.share_memory_() for memory in host_memory(size)]
    processes, receivers = [], []
    for rank in range(size):
        receiver, sender = spawned.Pipe(duplex=False)
        process = spawned.Process(target=_run, args=(job, memories, rank, sender), daemon=True)
        process.start()
        sender.close()
        processes.append(process)
        receivers.append(receiver)
    try:
        for receiver in receivers:
            assert receiver.poll(limit_s), "a rank did not end"
            error = receiver.recv()
            assert not error, error
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run(job: Job, memories: Sequence[Tensor], rank: int, sender: Connection) -> None:
    sums.PROGRAMS = 2  # waits take the interpreter long
    try:
        job(sums_of(memories, rank), rank, len(memories))
    except Exception as error:
        sender.send(f"rank {rank}: {type(error).__name__} {error}")
    else:
        sender.send("")
