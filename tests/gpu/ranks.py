"""Ranks of a small group, in separate processes that may hang or crash with their device."""

import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from eesd_dist.errors import PeerLost
from eesd_dist.transport.authentication.handshake import Address
from eesd_dist.transport.authentication.key_store import StoreHost
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.nccl import NcclPlane, _NcclExchange
from eesd_dist.transport.page_wire import Chunk, receive_pages, send_pages
from eesd_dist.transport.rank_sums import pairwise_sum
from eesd_dist.transport.rendezvous import build_group, connect_store

TIMEOUT_S = 4.0
"""Deadline of every wait between the ranks, unless a test says another one."""
_JOIN_S = 25.0
_LIMIT_S = 45.0
_LENGTH = 100_000
_NUM_PAGES = 32
_PAGE_BYTES = 1 << 20

SHARED_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "2",
}
"""Environment of ranks that share a GPU: NCCL takes each process for a host of its own and connects
them by sockets."""

Figures = dict[str, object]
Job = Callable[[ProcessGroup, torch.device], Figures | None]
"""Work of a rank in a separate process: raises an error if a check fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """End of one rank's process."""

    error: str = ""
    figures: Figures = field(default_factory=dict)


class _Member(NamedTuple):
    """Where and how a rank runs."""

    at: Address
    rank: int
    size: int
    device: str
    in_memory: bool
    address: str
    timeout_s: float
    environment: Mapping[str, str]


def run_ranks(
    job: Job,
    devices: Sequence[str],
    *,
    limit_s: float = _LIMIT_S,
    timeout_s: float = TIMEOUT_S,
    in_memory: bool = True,
    num_nodes: int = 1,
    dying: Collection[int] = (),
    environment: Mapping[str, str] | None = None,
) -> list[Figures]:
    """Runs a process per device, and returns the ranks' figures. Fails if one raises an error,
    crashes or does not end in time; of `dying` ranks, if one does not end.

    Several ranks may have one GPU. A device `cpu<-cuda` is a group on the CPU for tensors of the
    GPU. `in_memory`: as of `build_group`; `num_nodes`: nodes that this one stands for;
    `environment`: added to that of the ranks.
    """
    host = StoreHost(address="127.0.0.1")
    deadline_s = time.monotonic() + limit_s
    shared = SHARED_GPU if len(set(devices)) < len(devices) else {}
    with ExitStack() as stack:
        receivers = []
        for rank, device in enumerate(devices):
            own = {**shared, "NCCL_HOSTID": f"rank-{rank}"} if shared else {}
            own |= environment or {}
            node = 1 + rank * num_nodes // len(devices)
            member = _Member(
                host.at, rank, len(devices), device, in_memory, f"127.0.0.{node}", timeout_s, own
            )
            receivers.append(stack.enter_context(_rank(job, member)))
        ends = [_end_of(receiver, deadline_s - time.monotonic()) for receiver in receivers]
    errors = [end.error for rank, end in enumerate(ends) if end.error and rank not in dying]
    assert not errors, " | ".join(dict.fromkeys(errors))
    return [end.figures for end in ends]


@contextmanager
def _rank(job: Job, member: _Member) -> Iterator[Connection]:
    spawned = multiprocessing.get_context("spawn")
    receiver, sender = spawned.Pipe(duplex=False)
    process = spawned.Process(target=_run, args=(job, member, sender), daemon=True)
    process.start()
    sender.close()  # the end of the process is then the end of the pipe
    try:
        yield receiver
    finally:
        process.kill()
        process.join()


def _end_of(receiver: Connection, seconds: float) -> RankEnd:
    try:
        if not receiver.poll(max(seconds, 0.0)):
            return RankEnd(error="a rank did not end in time")
        end: RankEnd = receiver.recv()
    except EOFError:
        return RankEnd(error="a rank's process ended without a report")
    return end


def _run(job: Job, member: _Member, sender: Connection) -> None:
    os.environ.update(member.environment)
    logging.basicConfig(level=logging.INFO)  # a failed test shows how the ranks sum, and why
    error, figures = "", None
    over, _, source = member.device.partition("<-")
    try:
        group = build_group(
            connect_store(member.at, timeout_s=_JOIN_S),
            epoch=1,
            name="check",
            rank=member.rank,
            size=member.size,
            timeout_s=member.timeout_s if member.size > 1 else _JOIN_S,
            join_timeout_s=_JOIN_S,
            device=over,
            address=member.address,
            in_memory=member.in_memory,
        )
        figures = job(group, torch.device(source or over))
    except Exception as failure:
        text = f"rank {member.rank}: {type(failure).__name__} {failure} {failure.__cause__ or ''}"
        error = " ".join(text.split())[-700:]
    sender.send(RankEnd(error=error, figures=figures or {}))


def exchange(group: ProcessGroup, device: torch.device) -> None:
    """Checks sum, gather and broadcast of whole numbers, of which the order of sums is irrelevant,
    and the order of sums with random numbers, for few and for many rows.

    A group on the CPU gets the device's tensors through the host.
    """

    def content(rank: int) -> Tensor:
        x = torch.arange(_LENGTH, dtype=torch.float32, device=device) % 1000 * (rank + 1)
        return x.to(group.device)

    ranks = range(group.size)
    total = group.all_reduce(content(group.rank))
    gathered = group.all_gather(content(group.rank))
    shared = group.broadcast(content(group.rank), source=group.size - 1)
    group.check()
    assert torch.equal(total, content(sum(rank + 1 for rank in ranks) - 1)), "another sum"
    for rank, x in enumerate(gathered):
        assert torch.equal(x, content(rank)), "another gather"
    assert torch.equal(shared, content(group.size - 1)), "another broadcast"
    for num_rows in (16, 1_023):
        generator = torch.Generator().manual_seed(num_rows)
        inputs = [torch.randn(num_rows, 193, generator=generator) for _ in ranks]
        # In member on a CPU.
        total = group.all_reduce(inputs[group.rank].to(group.device, copy=True)).cpu()
        assert torch.equal(total, pairwise_sum(inputs)), "another order of the sum"


def exchange_and_abort(group: ProcessGroup, device: torch.device) -> None:
    """Checks a group of one, and operations of sums over three or more ranks, from a rank to
    itself."""
    exchange(group, device)
    group.abort()
    plane = NcclPlane(
        HashStore(), rank=0, size=1, timeout_s=20.0, join_timeout_s=20.0, device=device
    )
    x = torch.arange(1_000.0, device=device).view(1, -1)
    gathered = plane.all_gather(x, operation="all_gather")
    over_nccl = _NcclExchange(plane, plane._everyone, x.dtype, "all_to_all")
    swapped = over_nccl.swapped(x)
    torch.cuda.synchronize(device)
    plane.abort()
    assert torch.equal(gathered[0], x), "another gather"
    assert torch.equal(swapped, x), "another exchange"


def skip_a_sum(group: ProcessGroup, device: torch.device) -> None:
    """Lets rank 1 skip a sum: rank 0's kernel is stuck until its deadline aborts it."""
    if group.rank > 0:
        time.sleep(3 * TIMEOUT_S)
        return
    started_s = time.perf_counter()
    try:
        group.all_reduce(torch.ones(_LENGTH, device=device))
        torch.cuda.synchronize(device)
        group.check()
    except PeerLost:
        assert time.perf_counter() - started_s < 2 * TIMEOUT_S, "aborted after its deadline"
    else:
        raise AssertionError("the sum is done without rank 1")


def move_pages(group: ProcessGroup, device: torch.device) -> None:
    """Sends pages on the device from rank 0 to rank 1, which checks each byte."""
    generator = torch.Generator().manual_seed(1)
    shape = (_NUM_PAGES, _PAGE_BYTES)
    content_PB = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)
    arrived_PB = torch.zeros_like(content_PB)

    def read(chunk: Chunk) -> Tensor:
        return content_PB[chunk.first_page : chunk.last_page].view(-1)

    def write(chunk: Chunk, content_B: Tensor) -> None:
        arrived_PB[chunk.first_page : chunk.last_page] = content_B.to(device).view(-1, _PAGE_BYTES)

    options: dict[str, Any] = {
        "page_bytes": (_PAGE_BYTES,),
        "num_pages": _NUM_PAGES,
        "number": "check",
        "timeout_s": TIMEOUT_S,
    }
    with group.raises_lost_peers():
        if group.rank == 0:
            send_pages(group, read, **options)
            return
        receive_pages(group, write, **options)
    assert torch.equal(arrived_PB, content_PB), "another content of pages"
