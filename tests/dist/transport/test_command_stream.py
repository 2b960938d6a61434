"""Commands of every size from rank 0 of a stage to another rank."""

import threading
import time

import pytest
import torch

from eesd_dist.page_table import PageTable
from eesd_dist.transport.command_stream import DistCommandSink, DistCommandSource
from eesd_dist.transport.commands import Command, RunHead, RunLayers
from eesd_dist.transport.contracts import RowSegment
from tests.dist.transport.peers import in_threads, join_threads
from tests.unit.transport.test_commands import plain

pytestmark = pytest.mark.dist

LONG = RowSegment(0, 1, PageTable(range(20_000)))
"""Its pages alone do not fit in one frame."""


def test_commands_of_every_size_arrive_with_their_rows_and_without_any() -> None:
    commands: list[Command] = [
        RunLayers(tokens=[5], segments=[LONG]),
        RunHead(segments=[LONG], hidden_TD=torch.rand(1, 8)),
        RunHead(segments=[LONG], hidden_TD=torch.rand(1, 20_000)),
        RunLayers(tokens=[6], segments=[RowSegment(1, 1, PageTable([0]))]),
    ]
    leading, following = join_threads(2)
    received: list[Command] = []

    def lead() -> None:
        sink = DistCommandSink(leading)
        for command in commands:
            sink.announce(command)
        sink.close()

    def follow() -> None:
        source = DistCommandSource(following)
        while (command := source.next_command()) is not None:
            received.append(command)

    in_threads(lead, follow)
    assert [plain(command) for command in received] == [plain(command) for command in commands]


def test_a_follower_says_which_command_it_is_in_and_none_while_it_waits_for_the_next() -> None:
    leading, following = join_threads(2)
    sink, source = DistCommandSink(leading), DistCommandSource(following)
    numbers: list[int | None] = []

    def follow() -> None:
        while source.next_command() is not None:
            numbers.append(following.number)

    waiting = threading.Thread(target=follow)
    waiting.start()
    for number in (1, 2):
        time.sleep(0.2)
        assert following.number is None
        assert len(numbers) == number - 1
        sink.announce(RunLayers(tokens=[6], segments=[RowSegment(1, 1, PageTable([0]))]))
    sink.close()
    waiting.join(10.0)
    assert numbers == [1, 2]
