"""The stream of commands of a draft stage with ranks that are threads of one process.

Rank 0's `announce` puts a command into each follower's queue. A follower waits for one as long as
the stream is open; tests bound that wait with `timeout_s` to get an error instead.
"""

import queue
from collections.abc import Sequence

from eesd_dist.errors import PeerLost
from eesd_dist.transport.commands import Command

CommandQueue = queue.SimpleQueue[Command | None]


class ThreadCommandSink:
    """Sends commands to followers that are threads of this process."""

    def __init__(self, queues: Sequence[CommandQueue]) -> None:
        self._queues = tuple(queues)

    def join(self, queues: Sequence[CommandQueue]) -> None:
        """Switches to the next epoch's followers, as many as before."""
        assert len(queues) == len(self._queues), "a stage keeps its number of ranks"
        self._queues = tuple(queues)

    def announce(self, command: Command) -> None:
        for waiting in self._queues:
            waiting.put(command)

    def check(self) -> None:
        return

    def close(self) -> None:
        for waiting in self._queues:
            waiting.put(None)


class ThreadCommandSource:
    """A follower's end."""

    def __init__(self, commands: CommandQueue, *, timeout_s: float | None = None) -> None:
        """`timeout_s` None: waits as long as the stream is open."""
        self._commands = commands
        self._timeout_s = timeout_s

    def next_command(self) -> Command | None:
        try:
            return self._commands.get(timeout=self._timeout_s)
        except queue.Empty:
            reason = f"no command within {self._timeout_s:g} s"
            raise PeerLost(
                peer="the leading thread", operation="waiting for a command", reason=reason
            ) from None


def command_queues(num_followers: int) -> list[CommandQueue]:
    """Returns one queue for each follower."""
    return [queue.SimpleQueue() for _ in range(num_followers)]


def thread_commands(
    num_followers: int, *, timeout_s: float | None = None
) -> tuple[ThreadCommandSink, list[ThreadCommandSource]]:
    """Returns rank 0's end and one end for each follower."""
    queues = command_queues(num_followers)
    sources = [
        ThreadCommandSource(follower_queue, timeout_s=timeout_s) for follower_queue in queues
    ]
    return ThreadCommandSink(queues), sources
