"""The stream of commands from draft rank 0 to the other ranks of its stage, in order.

A follower waits for the next command as long as the drafting actor lives; within a command every
wait has the group's deadline. A command out of order is refused: a rank that missed one would
compute on wrong pages.
"""

from typing import Protocol

from eesd_dist.errors import WireError
from eesd_dist.transport import wire
from eesd_dist.transport.commands import Command, decode_command, encode_command
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.transfers import Tag, Transfer, finish_all

_LEADER = 0


class CommandSink(Protocol):
    """Rank 0's end."""

    def announce(self, command: Command) -> None:
        """Sends the command to every follower; does not wait for them to run it."""
        ...

    def check(self) -> None:
        """Raises PeerLost when work on a GPU was aborted; its results must not be used."""
        ...

    def close(self) -> None: ...


class CommandSource(Protocol):
    """A follower's end."""

    def next_command(self) -> Command | None:
        """Returns the next command, or None when rank 0 has closed the stream."""
        ...


class DistCommandSink:
    """Sends commands to the other ranks of a process group."""

    def __init__(self, group: ProcessGroup) -> None:
        self.join(group)

    def join(self, group: ProcessGroup) -> None:
        """Switches to the next epoch's group; command numbers start from 1 again."""
        assert group.rank == _LEADER, f"rank {group.rank} announces, only rank 0 may"
        self._group = group
        self._number = 0
        self._sending: list[Transfer] = []

    def announce(self, command: Command) -> None:
        self._number += 1
        message = encode_command(command, epoch=self._group.epoch, number=self._number)
        self._group.doing(self._number, of="command")
        self._send(message, operation=f"{_name(command)} {self._number}")

    def check(self) -> None:
        self._group.check()

    def close(self) -> None:
        message = wire.encode_close(epoch=self._group.epoch)
        self._send(message, operation="closing the draft stage", is_last=True)
        self._finish()

    def _send(self, message: wire.Message, *, operation: str, is_last: bool = False) -> None:
        """Starts the messages without waiting for them."""
        self._finish()
        self._sending = [
            self._group.send_message(
                message.buffers, to=follower, tag=Tag.SHARE, operation=operation, confirmed=is_last
            )
            for follower in range(1, self._group.size)
        ]
        for x in message.separate:
            self._group.broadcast(x, source=_LEADER)

    def _finish(self) -> None:
        finish_all(self._sending, timeout_s=self._group.timeout_s)
        self._sending = []


class DistCommandSource:
    """Receives commands from rank 0 of a process group."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._number = 0

    def next_command(self) -> Command | None:
        self._group.doing(None)
        content = self._group.receive_message(
            source=_LEADER, tag=Tag.SHARE, operation="waiting for a command", timeout_s=None
        )
        prefix = wire.decode_prefix(content, epoch=self._group.epoch)
        if prefix.kind is wire.Kind.CLOSE:
            return None
        self._number = _next_number(prefix.round_id, after=self._number)
        self._group.doing(self._number, of="command")
        rows, _ = wire.receive_tensors(
            prefix, content, self._group.broadcast, device=self._group.device
        )
        return decode_command(prefix, content, rows)


def _next_number(number: int, *, after: int) -> int:
    if number != after + 1:
        raise WireError(f"found command {number}, expected command {after + 1}: one has been lost")
    return number


def _name(command: Command) -> str:
    return f"command {type(command).__name__}"
