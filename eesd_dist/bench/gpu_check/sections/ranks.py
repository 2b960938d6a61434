"""A rank of a small group in a separate process, which prints its report as a line of JSON.

python -m eesd_dist.bench.gpu_check.sections.ranks JOB RANK SIZE PORT DEVICE

The secret of the rendezvous is in the environment, which other users cannot read.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from eesd_dist.errors import EesdError, PeerLost
from eesd_dist.transport.authentication.handshake import Address
from eesd_dist.transport.authentication.key_store import StoreHost
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.page_wire import Chunk, receive_pages, send_pages
from eesd_dist.transport.rank_sums import sum_in_rank_order
from eesd_dist.transport.rendezvous import build_group, connect_store

Job = Literal["exchange", "stuck", "pages"]

TIMEOUT_S = 4.0
"""Deadline of every wait between the ranks."""
_JOIN_S = 25.0
_ADDRESS = "127.0.0.1"
_SECRET = "EESD_RENDEZVOUS_SECRET"
_LENGTH = 100_000
_NUM_PAGES = 32
_PAGE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """Result of one rank."""

    ok: bool
    formed: bool
    """True if its group was connected."""
    seconds: float
    said: str = ""


def run_ranks(job: Job, devices: Sequence[str], *, seconds: float) -> list[RankReport]:
    """Runs a process per device; one that does not end in time is killed and counts as failed."""
    host = StoreHost(address=_ADDRESS)
    words = [sys.executable, "-m", __name__, job]
    processes = [
        subprocess.Popen(
            [*words, str(rank), str(len(devices)), str(host.at.port), device],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, _SECRET: host.at.secret},
        )
        for rank, device in enumerate(devices)
    ]
    deadline = time.monotonic() + seconds
    try:
        return [_report_of(process, deadline - time.monotonic()) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _report_of(process: "subprocess.Popen[str]", seconds: float) -> RankReport:
    try:
        out, err = process.communicate(timeout=max(seconds, 0.1))
        return RankReport(**json.loads(out.strip().splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return RankReport(ok=False, formed=False, seconds=seconds, said="it did not end in time")
    except (IndexError, TypeError, ValueError):
        said = (err.strip().splitlines() or ["it said nothing"])[-1]
        return RankReport(ok=False, formed=False, seconds=seconds, said=said[:300])


def exchange(group: ProcessGroup, device: torch.device) -> bool:
    """Checks sum, gather and broadcast of whole numbers, of which the order of sums is irrelevant.

    A group on the CPU gets the device's tensors through the host.
    """

    def mine(rank: int) -> torch.Tensor:
        x = torch.arange(_LENGTH, dtype=torch.float32, device=device) % 1000 * (rank + 1)
        return x.to(group.device)

    ranks = range(group.size)
    total = group.all_reduce(mine(group.rank))
    parts = group.all_gather(mine(group.rank))
    told = group.broadcast(mine(group.rank), source=group.size - 1)
    group.check()
    summed = torch.equal(total, mine(sum(rank + 1 for rank in ranks) - 1))
    summed = summed and all(_sums_in_order(group, num_rows) for num_rows in (16, 1_023))
    gathered = all(torch.equal(part, mine(rank)) for rank, part in enumerate(parts))
    return summed and gathered and torch.equal(told, mine(group.size - 1))


def _sums_in_order(group: ProcessGroup, num_rows: int) -> bool:
    """Checks the order of sums with random numbers, for few and for many rows."""
    generator = torch.Generator().manual_seed(num_rows)
    inputs = [torch.randn(num_rows, 193, generator=generator) for _ in range(group.size)]
    total = group.all_reduce(inputs[group.rank].to(group.device, copy=True))  # in place on a CPU
    return torch.equal(total.cpu(), sum_in_rank_order(inputs))


def _move_pages(group: ProcessGroup, device: torch.device) -> bool:
    """Sends pages on the device from rank 0 to rank 1, which checks each byte."""
    generator = torch.Generator().manual_seed(1)
    shape = (_NUM_PAGES, _PAGE_BYTES)
    sent_PB = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)
    if group.rank == 0:
        with group.raises_lost_peers():
            send_pages(
                group,
                lambda chunk: sent_PB[_pages_of(chunk)].view(-1),
                page_bytes=(_PAGE_BYTES,),
                num_pages=_NUM_PAGES,
                number="check",
                timeout_s=TIMEOUT_S,
            )
        return True
    found_PB = torch.zeros_like(sent_PB)

    def write(chunk: Chunk, content_B: torch.Tensor) -> None:
        found_PB[_pages_of(chunk)] = content_B.to(device).view(-1, _PAGE_BYTES)

    with group.raises_lost_peers():
        receive_pages(
            group,
            write,
            page_bytes=(_PAGE_BYTES,),
            num_pages=_NUM_PAGES,
            number="check",
            timeout_s=TIMEOUT_S,
        )
    return torch.equal(found_PB, sent_PB)


def _pages_of(chunk: Chunk) -> slice:
    return slice(chunk.first_page, chunk.last_page)


def _lose(group: ProcessGroup, device: torch.device) -> bool:
    """Lets rank 1 skip a sum: rank 0's kernel is stuck until its deadline aborts it."""
    if group.rank > 0:
        time.sleep(3 * TIMEOUT_S)
        return True
    started_s = time.perf_counter()
    try:
        group.all_reduce(torch.ones(_LENGTH, device=device))
        torch.cuda.synchronize(device)
        group.check()
    except PeerLost:
        return time.perf_counter() - started_s < 2 * TIMEOUT_S
    return False


def main(argv: Sequence[str]) -> int:
    job, rank, size, port, device = argv[0], int(argv[1]), int(argv[2]), int(argv[3]), argv[4]
    at = Address(host=_ADDRESS, port=port, secret=os.environ[_SECRET])
    over, _, lies = device.partition("<-")
    started_s, formed, said = time.perf_counter(), False, ""
    ok = False
    try:
        group = build_group(
            connect_store(at, timeout_s=_JOIN_S),
            epoch=1,
            name=job,
            rank=rank,
            size=size,
            timeout_s=TIMEOUT_S,
            join_timeout_s=_JOIN_S,
            device=over,
        )
        formed = True
        started_s = time.perf_counter()
        work = {"exchange": exchange, "stuck": _lose, "pages": _move_pages}[job]
        ok = work(group, torch.device(lies or over))
    except (EesdError, RuntimeError) as error:
        cause = error.__cause__
        said = " ".join(f"{error} {'' if cause is None else cause}".split())
    seconds = time.perf_counter() - started_s
    report = RankReport(ok=ok, formed=formed, seconds=seconds, said=said[-700:])
    sys.stdout.write(json.dumps(asdict(report)) + "\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
