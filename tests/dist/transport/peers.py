"""The peer processes of these tests."""

import multiprocessing
import os
import signal
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor

from eesd_dist.errors import PeerLost
from eesd_dist.transport.authentication.handshake import Address
from eesd_dist.transport.authentication.key_store import StoreHost
from eesd_dist.transport.authentication.refused import RefusedConnections
from eesd_dist.transport.channel import (
    DistRoundSource,
    DistVerifyChannel,
    follow_round,
    share_close,
    share_round,
)
from eesd_dist.transport.contracts import RoundHeader, VerifyReply
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.rendezvous import build_group, connect_store
from eesd_dist.transport.transfers import finish_all
from tests.unit.transport.rounds import header, hidden, reply_with

ENDS = ("draft rank 0", "verify rank 0")
RANKS = ("verify rank 0", "verify rank 1")

# One server process imports torch; the peers are forked from it, before it has any thread.
_peers = multiprocessing.get_context("forkserver")
_peers.set_forkserver_preload(["torch", "eesd_dist.transport.channel"])


@contextmanager
def peer_process(target: Any, *args: object) -> Iterator[BaseProcess]:
    process = _peers.Process(target=target, args=args, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join(10)


def join_channel(at: Address, rank: int, *, timeout_s: float, epoch: int = 1) -> ProcessGroup:
    return build_group(
        connect_store(at, timeout_s=10),
        epoch=epoch,
        name="channel",
        rank=rank,
        size=2,
        timeout_s=timeout_s,
        join_timeout_s=20.0,
        members=ENDS,
    )


def join_verify_stage(
    at: Address, rank: int, *, timeout_s: float, size: int = 2, in_memory: bool = True
) -> ProcessGroup:
    return build_group(
        connect_store(at, timeout_s=10),
        epoch=1,
        name="verify",
        rank=rank,
        size=size,
        timeout_s=timeout_s,
        join_timeout_s=20.0,
        members=[f"verify rank {number}" for number in range(size)],
        in_memory=in_memory,
    )


def join_threads(
    size: int, *, timeout_s: float = 10.0, refusals: RefusedConnections | None = None
) -> list[ProcessGroup]:
    """Returns the ranks of one group, all in this process."""
    host = StoreHost(refusals=refusals)
    groups: dict[int, ProcessGroup] = {}

    def join(rank: int) -> None:
        store = connect_store(host.at, timeout_s=10)
        groups[rank] = build_group(
            store,
            epoch=1,
            name="threads",
            rank=rank,
            size=size,
            timeout_s=timeout_s,
            join_timeout_s=20.0,
            refusals=refusals,
        )

    in_threads(*(lambda rank=rank: join(rank) for rank in range(size)))
    return [groups[rank] for rank in range(size)]


def in_threads(*jobs: Any) -> None:
    """Returns when all jobs have ended. Raises the errors of those that failed: of one alone, its
    own."""
    with ThreadPoolExecutor(len(jobs)) as threads:
        running = [threads.submit(job) for job in jobs]
    errors = [error for job in running if (error := job.exception()) is not None]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise BaseExceptionGroup(f"{len(errors)} of {len(jobs)} jobs failed", errors)


def fingerprint(header: RoundHeader, hidden_TD: Tensor, probs_KV: Tensor | None) -> list[int]:
    """Returns numbers that change when any part of a round changes."""
    tensors = [x for x in (hidden_TD, probs_KV) if x is not None]
    contents = [bytes(x.contiguous().view(-1).view(torch.uint8).numpy()) for x in tensors]
    texts = [repr(header).encode(), repr([(x.shape, x.dtype) for x in tensors]).encode()]
    return [zlib.crc32(content) >> 1 for content in (*texts, *contents)]


def answer(header: RoundHeader, hidden_TD: Tensor, probs_KV: Tensor | None) -> VerifyReply:
    return reply_with(fingerprint(header, hidden_TD, probs_KV), round_id=header.round_id)


def verify(at: Address, timeout_s: float, delay_s: float = 0.0) -> None:
    """Answers every round with its fingerprint."""
    torch.set_num_threads(1)
    source = DistRoundSource(join_channel(at, 1, timeout_s=timeout_s))
    while (received := source.next_round()) is not None:
        time.sleep(delay_s)
        source.reply(answer(*received))


def verify_nothing(at: Address, timeout_s: float) -> None:
    """Receives one round and does not answer."""
    torch.set_num_threads(1)
    source = DistRoundSource(join_channel(at, 1, timeout_s=timeout_s))
    source.next_round()
    time.sleep(60)


def lead(at: Address, timeout_s: float) -> None:
    """Runs verify rank 0 of two: shares each round, and answers with the sum over both ranks."""
    torch.set_num_threads(1)
    source = DistRoundSource(join_channel(at, 1, timeout_s=timeout_s))
    stage = join_verify_stage(at, 0, timeout_s=timeout_s)
    while (received := source.next_round()) is not None:
        sharing = share_round(stage, *received)
        views = torch.tensor(fingerprint(*received))
        total = stage.all_reduce(views.clone())
        finish_all(sharing, timeout_s=timeout_s)
        assert torch.equal(total, 2 * views)
        source.reply(reply_with((total // 2).tolist(), round_id=received[0].round_id))
    share_close(stage)


def follow(at: Address, timeout_s: float) -> None:
    torch.set_num_threads(1)
    stage = join_verify_stage(at, 1, timeout_s=timeout_s)
    while (received := follow_round(stage)) is not None:
        stage.all_reduce(torch.tensor(fingerprint(*received)))


def lead_and_stall(at: Address, timeout_s: float) -> None:
    """Joins the verify stage and never shares a round."""
    stage = join_verify_stage(at, 0, timeout_s=timeout_s)
    time.sleep(60)
    del stage  # kept until here: a garbage-collected group closes its connections


def _telling(reports: Connection, groups: Sequence[ProcessGroup], work: Callable[[], None]) -> None:
    """Reports how and when the work ended; leaves its groups like the loop of a rank."""
    try:
        work()
        reports.send((time.monotonic(), None))
    except PeerLost as error:
        reports.send((time.monotonic(), error))
    finally:
        for group in groups:
            group.abort("the loop has ended")


def lead_and_tell(
    at: Address, timeout_s: float, reports: Connection, stop_in_round: int = 0
) -> None:
    """Runs like `lead`, but freezes itself in the middle of one round."""
    torch.set_num_threads(1)
    channel = join_channel(at, 1, timeout_s=timeout_s)
    source = DistRoundSource(channel)
    stage = join_verify_stage(at, 0, timeout_s=timeout_s)

    def work() -> None:
        while (received := source.next_round()) is not None:
            sharing = share_round(stage, *received)
            if received[0].round_id == stop_in_round:
                # The follower must have all of it: the rest may be sent by a thread.
                stage.recv(torch.zeros(1), source=1, operation="waiting for the follower")
                os.kill(os.getpid(), signal.SIGSTOP)
            views = stage.all_reduce(torch.tensor(fingerprint(*received)))
            finish_all(sharing, timeout_s=timeout_s)
            source.reply(reply_with((views // 2).tolist(), round_id=received[0].round_id))
        share_close(stage)

    _telling(reports, [channel, stage], work)


def follow_and_tell(
    at: Address, timeout_s: float, reports: Connection, stop_in_round: int = 0
) -> None:
    """Tells rank 0 when it has the round in which rank 0 freezes itself."""
    torch.set_num_threads(1)
    stage = join_verify_stage(at, 1, timeout_s=timeout_s)

    def work() -> None:
        while (received := follow_round(stage)) is not None:
            if received[0].round_id == stop_in_round:
                stage.send(torch.zeros(1), to=0, operation="telling rank 0")
            stage.all_reduce(torch.tensor(fingerprint(*received)))

    _telling(reports, [stage], work)


def draft_and_stop(at: Address, timeout_s: float, reports: Connection) -> None:
    """Runs one round and freezes; once it is continued, runs another one."""
    torch.set_num_threads(1)
    group = join_channel(at, 0, timeout_s=timeout_s)
    channel = DistVerifyChannel(group)

    def work() -> None:
        for round_id in (1, 2):
            channel.send(header(round_id, epoch=1), hidden())
            channel.receive()
            if round_id == 1:
                reports.send("frozen")
                os.kill(os.getpid(), signal.SIGSTOP)
        channel.close()

    _telling(reports, [group], work)


def host_store(reports: Connection) -> None:
    host = StoreHost()
    reports.send(host.at)
    time.sleep(60)
