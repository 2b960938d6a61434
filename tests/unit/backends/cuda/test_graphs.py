"""Captures in pieces and what an error in one leaves, with toys in place of torch's graphs."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from eesd_dist.backends.cuda import graphs
from eesd_dist.backends.cuda.graphs import Graph, Graphs
from eesd_dist.errors import EngineError
from eesd_dist.transport.group_handles import SingleGroup

POOL = object()


class Piece:
    """A graph of torch that knows whether it is captured."""

    events: list[str]
    fails_to_end = False

    def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
        assert pool is POOL
        assert capture_error_mode == "thread_local"
        self.events.append("begin")

    def capture_end(self) -> None:
        assert self.events[-1] != "end", "torch ends a capture once"
        self.events.append("end")
        if self.fails_to_end:
            raise torch.OutOfMemoryError("no room for a graph")

    def replay(self) -> None:
        self.events.append("replay")


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> type[Piece]:
    class Own(Piece):
        pass

    Own.events = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Own)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: Own.events.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100 - len(Own.events), 200))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(graphs, "_capture_stream", lambda index: None)
    monkeypatch.setattr(graphs, "memory_of", lambda x: x)
    monkeypatch.setattr(graphs, "_graph_pool", lambda device: POOL)
    return Own


def exchange(events: list[str], x: Tensor) -> Any:
    def queue(y: Tensor, *, operation: str) -> None:
        assert y is x
        events.append(operation)

    return queue


def test_work_between_pieces_is_queued_between_their_replays(toy: type[Piece]) -> None:
    x, graph = torch.zeros(3), Graph[str](POOL)

    def work() -> str:
        for _ in range(2):
            toy.events.append("launch")
            graph.cut(exchange(toy.events, x), x)
        return "out"

    assert graph.capture(work) == 8
    launch_events = ["begin", "launch", "end"]
    assert toy.events == ["synchronize", *launch_events, *launch_events, "begin", "end"]
    toy.events.clear()
    assert graph.replay("replay of round 7") == "out"
    assert toy.events == ["replay", "replay of round 7"] * 2 + ["replay"]


def test_an_error_of_the_work_ends_the_capture(toy: type[Piece]) -> None:
    def work() -> None:
        raise RuntimeError("an operation that no graph can hold")

    with pytest.raises(RuntimeError, match="that no graph can hold"):
        Graph[None](POOL).capture(work)
    assert toy.events == ["synchronize", "begin", "end"]


def test_a_piece_without_room_is_no_lost_peer_and_is_ended_once(toy: type[Piece]) -> None:
    graph = Graph[None](POOL)
    toy.fails_to_end = True
    with pytest.raises(EngineError, match="could not be cut: no room for a graph"):
        graph.capture(lambda: graph.cut(exchange(toy.events, torch.zeros(3))))
    assert toy.events == ["synchronize", "begin", "end"]


def test_graphs_are_kept_up_to_a_number_the_latest_ones(
    toy: type[Piece], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "_MOST_GRAPHS", 2)
    graphs_of_keys: Graphs[int, str] = Graphs(torch.device("cpu"), name="toy", group=SingleGroup())
    for key in (1, 2, 1, 3):
        graphs_of_keys.run(key, lambda: "out")
    assert list(graphs_of_keys.by_key) == [1, 3]


def test_a_failed_capture_gives_its_memory_up(
    toy: type[Piece], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs_of_keys: Graphs[int, str] = Graphs(torch.device("cpu"), name="toy", group=SingleGroup())
    graphs_of_keys.run(1, lambda: "out")
    monkeypatch.setattr(graphs, "_graph_pool", lambda device: "another pool")
    toy.fails_to_end = True
    graphs_of_keys.run(2, lambda: "out")
    assert (graphs_of_keys.by_key, graphs_of_keys.has_room, graphs_of_keys._pool) == (
        {},
        False,
        "another pool",
    )
