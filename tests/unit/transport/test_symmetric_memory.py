"""The exchange of the ranks' memory: descriptors through sockets, one answer on every rank.

The sockets are real, and so are the descriptors: they are of files in memory, since there is no
driver of a GPU.
"""

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable

import pytest
import torch

from eesd_dist.transport.symmetric import memory
from eesd_dist.transport.symmetric.driver import DriverError, Mapping
from eesd_dist.transport.symmetric.memory import PeerMemory, share_memory

GPU = torch.device("cuda", 0)
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


class Host:
    """Memory of the host in the place of a driver."""

    def __init__(self) -> None:
        self.maps: dict[int, mmap.mmap] = {}
        self.freed: list[mmap.mmap] = []
        self.num_mapped = 0
        self.refuses_to_map: int | None = None
        """Number of the mapping that fails."""

    def allocate(self, num_bytes: int, *, device: int) -> tuple[Mapping, int]:
        descriptor = os.memfd_create("rank")
        os.truncate(descriptor, num_bytes)
        return self._mapped(descriptor, num_bytes), descriptor

    def map_peer(self, descriptor: int, size: int, *, device: int) -> Mapping:
        self.num_mapped += 1
        if self.num_mapped == self.refuses_to_map:
            raise DriverError("cuMemMap: CUDA_ERROR_INVALID_DEVICE")
        return self._mapped(descriptor, size)

    def free(self, address: int) -> None:
        self.freed.append(self.maps.pop(address))

    def _mapped(self, descriptor: int, size: int) -> Mapping:
        mapped = mmap.mmap(descriptor, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self.maps[address] = mapped
        return Mapping(address, size)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(memory, "allocate", host.allocate)
    monkeypatch.setattr(memory, "map_peer", host.map_peer)
    monkeypatch.setattr(Mapping, "free", lambda mapping: host.free(mapping.address))
    monkeypatch.setattr(memory, "_retired", [])
    return host


def join(size: int, node: Callable[[int], str] = lambda rank: "10.0.0.1") -> list[PeerMemory | str]:
    store = Store(size)
    answers: list[PeerMemory | str] = [""] * size

    def run(rank: int) -> None:
        answers[rank] = share_memory(SIZE, device=GPU, node=node(rank), joining=Rank(store, rank))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()
    return answers


def test_every_rank_sees_what_each_one_writes(host: Host) -> None:
    ranks = [rank for rank in join(3) if isinstance(rank, PeerMemory)]
    assert len(ranks) == 3
    assert len(host.maps) == 9
    for at, own in enumerate(ranks):
        ctypes.memset(own.addresses[at], 65 + at, 100)
    for own in ranks:
        assert [ctypes.string_at(address, 2) for address in own.addresses] == [b"AA", b"BB", b"CC"]


def test_memory_without_a_user_is_freed_by_the_next_group(host: Host) -> None:
    ranks = join(2)
    del ranks
    assert (len(host.maps), len(host.freed)) == (4, 0), "kernels may still use it"
    ranks = join(2)
    assert (len(host.maps), len(host.freed)) == (4, 4)
    assert len(ranks) == 2


@pytest.mark.parametrize("cause", ["no driver", "another node", "a mapping fails", "one is silent"])
def test_all_ranks_have_the_same_reason(
    cause: str, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_s = time.monotonic()
    if cause == "no driver":

        def refuses(num_bytes: int, *, device: int) -> tuple[Mapping, int]:
            raise DriverError("cuMemCreate: CUDA_ERROR_NOT_SUPPORTED")

        monkeypatch.setattr(memory, "allocate", refuses)
    elif cause == "a mapping fails":
        host.refuses_to_map = 3
    elif cause == "one is silent":
        monkeypatch.setattr(memory.socket, "send_fds", lambda *_: None)
    answers = join(
        3, (lambda rank: f"10.0.0.{rank % 2}") if cause == "another node" else lambda _: ""
    )
    reasons = {
        "no driver": "cuMemCreate: CUDA_ERROR_NOT_SUPPORTED",
        "another node": "its ranks are on several nodes",
        "a mapping fails": "CUDA_ERROR_INVALID_DEVICE",
        "one is silent": "a peer sent no memory",
    }
    assert len(set(map(str, answers))) == 1
    assert reasons[cause] in str(answers[0])
    assert time.monotonic() - started_s < 10
    del answers
    num_maps = len(host.maps)
    join(3)
    assert len(host.freed) == num_maps
