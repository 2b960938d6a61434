"""The ranks of both stages as threads of this process, with injected losses.

Rank 0 of a stage computes in the calling thread; the other ranks run in separate threads, over a
`ThreadGroup`. `begin` starts an epoch with new groups, `end` ends it; weights are kept between
epochs. Errors of a follower are stored, since rank 0 sees only a lost peer.
"""

import queue
import threading
from collections.abc import Callable

import torch

from eesd_dist.bench.fuzz.links import ON_PURPOSE
from eesd_dist.config import EngineConfig
from eesd_dist.engine.build import build_draft_shard, build_verify_stage, head_shelf
from eesd_dist.engine.drafting.ranks import DraftShard, HeadShelf, follow_commands
from eesd_dist.engine.layout import layout_of
from eesd_dist.engine.page_store import PageStore
from eesd_dist.engine.verify import VerifyStage
from eesd_dist.errors import PeerLost
from eesd_dist.transport.command_stream import CommandSource
from eesd_dist.transport.commands import Command
from eesd_dist.transport.contracts import RoundHeader, TensorGroup, VerifyReply
from eesd_dist.transport.group_handles import GroupHandle, SingleGroup, UnconnectedGroup
from eesd_dist.transport.memory import Round, Verify
from eesd_dist.transport.thread_group import (
    ThreadCommandSink,
    ThreadCommandSource,
    ThreadGroup,
    command_queues,
    thread_group,
)

_END_S = 30.0


class LostOnPurposeError(Exception):
    """Ends a rank as if its process had died."""


class Countdown:
    """Raises at a chosen call; never before it is set."""

    def __init__(self) -> None:
        self._left: int | None = None

    def set(self, after: int) -> None:
        self._left = after

    def count(self) -> None:
        if self._left is None:
            return
        if self._left == 0:
            self._left = None
            raise LostOnPurposeError
        self._left -= 1


class Followers:
    """Threads of one stage's ranks other than rank 0, for one epoch."""

    def __init__(self, name: str, groups: list[ThreadGroup]) -> None:
        self._name = name
        self._groups = groups
        self._threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []
        """Errors that ended a follower, other than lost peers and injected losses."""

    def start(self, rank: int, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except LostOnPurposeError:
                self._abort(rank, ON_PURPOSE)
            except PeerLost as error:
                self._abort(rank, str(error))
            except BaseException as error:
                self.errors.append(error)
                self._abort(rank, repr(error))

        thread = threading.Thread(target=run, name=f"{self._name} rank {rank}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def end(self) -> None:
        """Wakes followers that wait for other ranks, and returns when all have ended."""
        for group in self._groups:
            group.abort("its epoch has ended")
        self.wait()

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(_END_S)
            assert not thread.is_alive(), f"{thread.name} does not end"

    def _abort(self, rank: int, reason: str) -> None:
        self._groups[rank].abort(f"{self._name} rank {rank}: {reason}")


def _handle(rank: int, size: int) -> GroupHandle:
    return GroupHandle(SingleGroup() if size == 1 else UnconnectedGroup(rank=rank, size=size))


class VerifyRanks:
    """Verify stage of one pipeline."""

    def __init__(self, config: EngineConfig, *, in_memory: bool) -> None:
        """`in_memory`: ranks sum inside of compiled calls."""
        self._config = config
        self._in_memory = in_memory
        self._size = config.parallel.verify_tensor_parallel_size
        self.loses_a_rank = Countdown()
        """Counts rounds of the last rank."""
        self._load()
        self._meet()

    def verify(
        self, header: RoundHeader, hidden_TD: torch.Tensor, draft_probs_KV: torch.Tensor | None
    ) -> VerifyReply:
        round_: Round = (header, hidden_TD, draft_probs_KV)
        for waiting in self._queues:
            waiting.put(round_)
        return self._verifies[0](*round_)

    def begin(self, *, fresh: bool) -> None:
        """Starts an epoch. `fresh`: loads the stage again, as a replaced process would."""
        if fresh:
            self._load()
        else:
            for stage in self._stages:
                stage.span.paged.begin()
        self._meet()

    def end(self) -> None:
        """Ends the epoch, without waiting for the ranks' work."""
        for waiting in self._queues:
            waiting.put(None)
        self._followers.end()

    def close(self) -> None:
        """Ends the followers after their outstanding work."""
        for waiting in self._queues:
            waiting.put(None)
        self._followers.wait()

    @property
    def size(self) -> int:
        return self._size

    @property
    def errors(self) -> list[BaseException]:
        return self._followers.errors

    def stores(self) -> list[PageStore]:
        return [PageStore(stage.span) for stage in self._stages]

    def _load(self) -> None:
        self._handles = [_handle(rank, self._size) for rank in range(self._size)]
        self._stages = [
            build_verify_stage(self._config, self.group_of(handle)) for handle in self._handles
        ]
        self._verifies: list[Verify] = [
            self.verifier(stage, rank=rank) for rank, stage in enumerate(self._stages)
        ]

    def group_of(self, handle: GroupHandle) -> TensorGroup:
        """Returns the group for a rank's sums, which a test may replace."""
        return handle

    def verifier(self, stage: VerifyStage, *, rank: int) -> Verify:
        """Returns the function that verifies a rank's rounds, which a test may replace."""
        return stage.verify

    def _meet(self) -> None:
        groups = thread_group(
            self._size,
            name="verify",
            timeout_s=self._config.parallel.timeout_s,
            in_memory=self._in_memory,
        )
        self._followers = Followers("verify", groups)
        self._queues: list[queue.SimpleQueue[Round | None]] = []
        if self._size == 1:
            return
        for handle, group in zip(self._handles, groups, strict=True):
            handle.join(group)
        for rank in range(1, self._size):
            rounds: queue.SimpleQueue[Round | None] = queue.SimpleQueue()
            self._queues.append(rounds)
            self._followers.start(rank, self._following(rank, rounds))

    def _following(
        self, rank: int, rounds: "queue.SimpleQueue[Round | None]"
    ) -> Callable[[], None]:
        verify = self._verifies[rank]

        def follow() -> None:
            while (round_ := rounds.get()) is not None:
                if rank == self._size - 1:
                    self.loses_a_rank.count()
                verify(*round_)

        return follow


class _CountedSource:
    """A follower's commands, with a loss at a chosen one."""

    def __init__(self, source: CommandSource, countdown: Countdown) -> None:
        self._source = source
        self._countdown = countdown

    def next_command(self) -> Command | None:
        command = self._source.next_command()
        if command is not None:
            self._countdown.count()
        return command


class DraftRanks:
    """Draft stage of one pipeline: rank 0's shard and the followers."""

    def __init__(self, config: EngineConfig, *, in_memory: bool) -> None:
        """`in_memory`: ranks sum inside of compiled calls."""
        self._config = config
        self._in_memory = in_memory
        self._size = config.parallel.draft_tensor_parallel_size
        self.loses_a_rank = Countdown()
        """Counts commands of the last rank."""
        layout = layout_of(config)
        self._handles = [_handle(rank, self._size) for rank in range(self._size)]
        self._shards = [build_draft_shard(config, layout, handle) for handle in self._handles]
        self._shelves: list[HeadShelf] = [
            head_shelf(config, layout, handle) for handle in self._handles
        ]
        self._sink = ThreadCommandSink(command_queues(self._size - 1))
        self._meet()

    @property
    def shard(self) -> DraftShard:
        """Rank 0's shard."""
        return self._shards[0]

    @property
    def group(self) -> GroupHandle:
        return self._handles[0]

    @property
    def commands(self) -> ThreadCommandSink | None:
        """The sink for commands; None without followers."""
        return self._sink if self._size > 1 else None

    def begin(self) -> None:
        for shard in self._shards[1:]:
            shard.begin()
        self._meet()

    def end(self) -> None:
        self._sink.close()
        self._followers.end()

    def close(self) -> None:
        self._sink.close()
        self._followers.wait()

    @property
    def errors(self) -> list[BaseException]:
        return self._followers.errors

    def stores(self) -> list[PageStore]:
        return [PageStore(shard.span, shard.head) for shard in self._shards]

    def _meet(self) -> None:
        groups = thread_group(
            self._size,
            name="draft",
            timeout_s=self._config.parallel.timeout_s,
            in_memory=self._in_memory,
        )
        self._followers = Followers("draft", groups)
        if self._size == 1:
            return
        for handle, group in zip(self._handles, groups, strict=True):
            handle.join(group)
        queues = command_queues(self._size - 1)
        self._sink.join(queues)
        for rank in range(1, self._size):
            source: CommandSource = ThreadCommandSource(queues[rank - 1])
            if rank == self._size - 1:
                source = _CountedSource(source, self.loses_a_rank)
            self._followers.start(rank, self._following(rank, source))

    def _following(self, rank: int, source: CommandSource) -> Callable[[], None]:
        shard, heads = self._shards[rank], self._shelves[rank]
        return lambda: follow_commands(shard, source, heads=heads)
