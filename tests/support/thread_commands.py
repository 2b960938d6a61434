"""Commands between threads, for tests of what draft ranks compute."""

import queue
from collections.abc import Sequence

from eesd_dist.errors import PeerLost
from eesd_dist.transport.commands import Command


class ThreadCommandSink:
    """To followers that are threads of this process."""

    def __init__(self, queues: "Sequence[queue.SimpleQueue[Command | None]]") -> None:
        self._queues = queues

    def announce(self, command: Command) -> None:
        for waiting in self._queues:
            waiting.put(command)

    def check(self) -> None:
        return

    def close(self) -> None:
        for waiting in self._queues:
            waiting.put(None)


class ThreadCommandSource:
    def __init__(self, commands: "queue.SimpleQueue[Command | None]", *, timeout_s: float) -> None:
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


def thread_commands(
    num_followers: int, *, timeout_s: float
) -> tuple[ThreadCommandSink, list[ThreadCommandSource]]:
    """The leading end, and one for each follower."""
    queues: list[queue.SimpleQueue[Command | None]] = [
        queue.SimpleQueue() for _ in range(num_followers)
    ]
    sources = [ThreadCommandSource(each, timeout_s=timeout_s) for each in queues]
    return ThreadCommandSink(queues), sources
