"""The exchange of the ranks' memory: descriptors through sockets, one answer on every rank."""

import ctypes
import tempfile
import threading
import time
from collections.abc import Callable

import pytest

from eesd_dist.transport import peer_memory
from eesd_dist.transport.host_sums import HostMemory
from eesd_dist.transport.peer_memory import Mapping, PeerMemory, share_memory

SIZE = 8192


class Store:
    """Values of ranks that are threads."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._values: dict[str, dict[int, bytes]] = {}

    def gathered(self, name: str, rank: int, value: bytes) -> tuple[bytes, ...]:
        with self._changed:
            values = self._values.setdefault(name, {})
            values[rank] = value
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: len(values) == self._size, 20.0)
            return tuple(values[rank] for rank in range(self._size))


class Rank:
    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self.rank = rank

    def gathered(self, name: str, own_value: bytes) -> tuple[bytes, ...]:
        return self._store.gathered(name, self.rank, own_value)

    def left_s(self) -> float:
        return 2.0


class CountedMapping:
    """Addresses of a host, and whether they were given back."""

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping
        self.address, self.size = mapping.address, mapping.size
        self.is_freed = False

    def free(self) -> None:
        self.is_freed = True
        self._mapping.free()


class Host(HostMemory):
    """Memory of the host, which can refuse."""

    refusals = (RuntimeError, OSError)

    def __init__(self) -> None:
        self.retired = []
        self.maps: list[CountedMapping] = []
        self.num_mapped = 0
        self.allocates = True
        self.refuses_to_map: int | None = None
        """Number of the mapping that fails."""

    @property
    def num_freed(self) -> int:
        return sum(mapping.is_freed for mapping in self.maps)

    def allocate(self, num_bytes: int) -> tuple[Mapping, int]:
        if not self.allocates:
            raise RuntimeError("cuMemCreate: CUDA_ERROR_NOT_SUPPORTED")
        mapping, descriptor = super().allocate(num_bytes)
        return self._counted(mapping), descriptor

    def map_peer(self, descriptor: int, size: int) -> Mapping:
        self.num_mapped += 1
        if self.num_mapped == self.refuses_to_map:
            raise RuntimeError("cuMemMap: CUDA_ERROR_INVALID_DEVICE")
        return self._counted(super().map_peer(descriptor, size))

    def _counted(self, mapping: Mapping) -> CountedMapping:
        self.maps.append(CountedMapping(mapping))
        return self.maps[-1]


@pytest.fixture
def host() -> Host:
    return Host()


def join(
    host: Host,
    size: int,
    node: Callable[[int], str] = lambda rank: "10.0.0.1",
    *,
    over_nodes: bool = False,
) -> list[PeerMemory | str]:
    store = Store(size)
    answers: list[PeerMemory | str] = [""] * size

    def run(rank: int) -> None:
        joining = Rank(store, rank)
        answers[rank] = share_memory(
            SIZE, source=host, node=node(rank), joining=joining, over_nodes=over_nodes
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()
    return answers


def test_every_rank_sees_what_each_one_writes(host: Host) -> None:
    ranks = [rank for rank in join(host, 3) if isinstance(rank, PeerMemory)]
    assert len(ranks) == 3
    assert len(host.maps) == 9
    for at, own in enumerate(ranks):
        ctypes.memset(own.addresses[at], 65 + at, 100)
    for own in ranks:
        assert [ctypes.string_at(address, 2) for address in own.addresses] == [b"AA", b"BB", b"CC"]


def test_ranks_over_nodes_have_the_memory_of_their_node(host: Host) -> None:
    answers = join(host, 4, lambda rank: f"10.0.0.{rank // 2}", over_nodes=True)
    ranks = [rank for rank in answers if isinstance(rank, PeerMemory)]
    assert len(host.maps) == 8
    for rank, own in enumerate(ranks):
        ctypes.memset(own.addresses[rank % 2], 65 + rank, 100)
    seen = [[ctypes.string_at(address, 1) for address in own.addresses] for own in ranks]
    assert seen == [[b"A", b"B"]] * 2 + [[b"C", b"D"]] * 2


@pytest.mark.parametrize(
    "nodes", ["0123", "0101", "0110", "0001", "000111", "00112"], ids=lambda nodes: str(nodes)
)
def test_nodes_that_have_no_part_of_the_sum_to_themselves_share_no_memory(
    nodes: str, host: Host
) -> None:
    answers = join(host, len(nodes), lambda rank: nodes[rank], over_nodes=True)
    reason = "its ranks are on several nodes, and not 2, 4 or 8 in a row on each"
    assert answers == [reason] * len(nodes)


def test_memory_without_a_user_is_freed_by_the_next_group(host: Host) -> None:
    ranks = join(host, 2)
    del ranks
    assert (len(host.maps), host.num_freed) == (4, 0), "kernels may still use it"
    ranks = join(host, 2)
    assert (len(host.maps), host.num_freed) == (8, 4)
    assert len(ranks) == 2


@pytest.mark.parametrize(
    "cause", ["no driver", "no folder", "another node", "a mapping fails", "one is silent"]
)
def test_all_ranks_have_the_same_reason(
    cause: str, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_s = time.monotonic()
    if cause == "no driver":
        host.allocates = False
    elif cause == "no folder":
        monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    elif cause == "a mapping fails":
        host.refuses_to_map = 3
    elif cause == "one is silent":
        monkeypatch.setattr(peer_memory.socket, "send_fds", lambda *_: None)
    answers = join(
        host, 3, (lambda rank: f"10.0.0.{rank % 2}") if cause == "another node" else lambda _: ""
    )
    reasons = {
        "no driver": "cuMemCreate: CUDA_ERROR_NOT_SUPPORTED",
        "no folder": "No such file or directory",
        "another node": "its ranks are on several nodes",
        "a mapping fails": "CUDA_ERROR_INVALID_DEVICE",
        "one is silent": "a peer sent no memory",
    }
    assert len(set(map(str, answers))) == 1
    assert reasons[cause] in str(answers[0])
    assert time.monotonic() - started_s < 10
    del answers
    num_maps = len(host.maps)
    join(host, 3)
    assert host.num_freed == num_maps
