"""The ranks of a stage as threads of the test's process, and the commands of a draft stage."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from eesd_dist.errors import PeerLost
from eesd_dist.transport.thread_group import (
    DEFAULT_TIMEOUT_S,
    ThreadCommandSink,
    ThreadCommandSource,
    ThreadGroup,
    command_queues,
    thread_group,
)

Result = TypeVar("Result")


def on_ranks(
    num_ranks: int,
    work: Callable[[ThreadGroup], Result],
    *,
    name: str = "thread",
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> list[Result]:
    """Runs `work` on each rank and returns the results in rank order. When a rank fails, the group
    is aborted and that rank's error is raised, not the PeerLost of the other ranks."""

    def guarded(group: ThreadGroup) -> Result:
        try:
            return work(group)
        except BaseException as error:
            group.abort(f"rank {group.rank} failed: {error}")
            raise

    groups = thread_group(num_ranks, name=name, timeout_s=timeout_s)
    with ThreadPoolExecutor(num_ranks) as pool:
        ranks = [pool.submit(guarded, group) for group in groups]
        errors = [error for rank in ranks if (error := rank.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, PeerLost)):
            raise error
        return [rank.result() for rank in ranks]


def thread_commands(
    num_followers: int, *, timeout_s: float | None = None
) -> tuple[ThreadCommandSink, list[ThreadCommandSource]]:
    """Returns rank 0's end and one end for each follower."""
    queues = command_queues(num_followers)
    sources = [
        ThreadCommandSource(follower_queue, timeout_s=timeout_s) for follower_queue in queues
    ]
    return ThreadCommandSink(queues), sources
