"""Times of a round in the verify ranks lie before its verdict, however late a rank ends."""

import time
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from eesd_dist.engine.verify import VerifyStage, follow_rounds, serve_rounds
from eesd_dist.transport.contracts import RoundHeader, VerifyReply
from eesd_dist.transport.group import ProcessGroup
from tests.dist.transport.peers import in_threads, join_threads
from tests.support.paired_channel import PairedSource, memory_pair
from tests.unit.transport.rounds import header, hidden, reply_with

pytestmark = pytest.mark.dist

TAIL_S = 0.5


class SlowAtTheEnd:
    """A stage that gathers once; a follower's thread is then not scheduled for a while."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def verify(
        self, header: RoundHeader, hidden_TD: Tensor, draft_probs_KV: Tensor | None
    ) -> VerifyReply:
        del hidden_TD, draft_probs_KV
        self.group.all_gather(torch.zeros(4))
        if self.group.rank:
            time.sleep(TAIL_S)
        return reply_with([1], round_id=header.round_id)


class Noting(PairedSource):
    """Notes when it replies."""

    def __init__(self, source: PairedSource) -> None:
        super().__init__(source._rounds, source._replies)
        self.replied_unix_s: list[float] = []

    def reply(self, reply: VerifyReply) -> None:
        super().reply(reply)
        self.replied_unix_s.append(time.time())


def test_a_followers_part_ends_before_the_verdict() -> None:
    groups = join_threads(2)
    stages = [cast(VerifyStage, SlowAtTheEnd(group)) for group in groups]
    channel, source = memory_pair(timeout_s=20.0)
    noting = Noting(source)
    times: dict[int, list[tuple[float, float]]] = {0: [], 1: []}

    def observe(rank: int) -> Any:
        return lambda _, began_s, ended_s: times[rank].append((began_s, ended_s))

    def ask() -> None:
        for round_id in (1, 2):
            channel.send(header(round_id, epoch=1), hidden())
            channel.receive()
        channel.close()

    began_s = time.time()
    in_threads(
        lambda: serve_rounds(stages[0], noting, observe=observe(0)),
        lambda: follow_rounds(stages[1], observe=observe(1)),
        ask,
    )
    assert len(times[0]) == len(times[1]) == len(noting.replied_unix_s) == 2
    for rank in (0, 1):
        for (began, ended), replied in zip(times[rank], noting.replied_unix_s, strict=True):
            assert began_s <= began <= ended <= replied
    assert time.time() - began_s > 2 * TAIL_S  # the follower did end late
