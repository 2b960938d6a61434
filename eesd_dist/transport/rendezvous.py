"""Rendezvous of ranks: one store in a long-lived process, one group per epoch.

The store is needed only while a group is being built; existing groups do not use it, except for
NCCL's first transfer between a pair. Nothing here decides which ranks belong to an epoch. Each rank
connects to the store separately: a client that waits for a key blocks all threads that share it.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
from msgspec.msgpack import Decoder, encode
from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store

from eesd_dist.devices import HOST
from eesd_dist.errors import ConfigError, EngineError, PeerLost
from eesd_dist.transport.authentication.acceptor import SocketAddress
from eesd_dist.transport.authentication.handshake import Address, peer_proof
from eesd_dist.transport.authentication.key_store import KeysMissing, StoreClient
from eesd_dist.transport.authentication.peers import PeerListener, Stranger, connect_to_peer
from eesd_dist.transport.authentication.refused import RefusedConnections
from eesd_dist.transport.contracts import Record
from eesd_dist.transport.failures import OWN_FAILURES, first_line, own_failure
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.host_sums import HostSums, join_host_sums
from eesd_dist.transport.link import Link
from eesd_dist.transport.link_plane import LinkPlane
from eesd_dist.transport.nccl import NcclPlane
from eesd_dist.transport.sum_layout import MOST_RANKS

logger = logging.getLogger(__name__)

_SHORTEST_S = 0.1
_POLL_S = 0.2


def connect_store(at: Address, *, timeout_s: float) -> StoreClient:
    """Returns a connection to the store, for one rank. Raises PeerLost."""
    client = StoreClient(at)
    client.connect(timeout_s=timeout_s)
    return client


def build_group(
    store: StoreClient,
    *,
    epoch: int,
    name: str,
    rank: int,
    size: int,
    timeout_s: float,
    join_timeout_s: float | None = None,
    device: torch.device | str = "cpu",
    address: str = "127.0.0.1",
    members: Sequence[str] | None = None,
    ordered_sums: bool = True,
    in_memory: bool = True,
    refusals: RefusedConnections | None = None,
) -> ProcessGroup:
    """Joins `size` ranks that call this with the same epoch and name.

    `timeout_s` is the deadline of the group's waits; `join_timeout_s` that of joining (default: the
    same), which includes waiting for ranks that are still loading their weights.
    `address` is the one at which the other ranks reach this host. `members` are the ranks' names
    in errors, stage and rank ("verify rank 0"); without them ranks are named after the group. The
    ranks' nodes, exchanged here, are added to the names. `ordered_sums`: sums are taken in pairs
    on GPUs too (`NcclPlane`); on CPUs they always are. `in_memory`: the ranks of one node sum
    in each other's memory, where they can; those of several nodes do so before they exchange the
    nodes' sums. `refusals` counts connections of others than the ranks.
    Raises PeerLost, EngineError when this rank's own device fails, or ConfigError if the ranks
    compute on different types of device.
    """
    names = tuple(members or (f"{name} rank {peer}" for peer in range(size)))
    assert len(names) == size, f"{len(names)} names for a group of {size} ranks"
    device = torch.device(device)
    exchange = _Exchange(
        store,
        prefix=f"epoch {epoch}/{name}",
        rank=rank,
        members=names,
        timeout_s=timeout_s if join_timeout_s is None else join_timeout_s,
        operation=f"joining group {name} of epoch {epoch}",
    )
    with exchange.naming_the_lost():
        links = _connect(
            exchange, address=address, device=device, refusals=refusals or RefusedConnections()
        )
        try:
            nccl, host_sums = None, None
            if device == HOST:
                if 1 < size <= MOST_RANKS and in_memory:
                    host_sums = _host_sums(
                        exchange, name=name, address=address, timeout_s=timeout_s
                    )
            else:
                nccl = NcclPlane(
                    exchange.store("nccl", timeout_s=exchange.timeout_s),
                    rank=rank,
                    size=size,
                    timeout_s=timeout_s,
                    join_timeout_s=exchange.left_s(),
                    device=device,
                    ordered_sums=ordered_sums,
                )
                if size > 1 and in_memory:
                    _sum_in_memory(
                        nccl, exchange, size=size, device=device, name=name, address=address
                    )
        except BaseException:
            links.abort()
            raise
    return ProcessGroup(
        name=name,
        epoch=epoch,
        rank=rank,
        members=exchange.members,
        timeout_s=timeout_s,
        device=device,
        links=links,
        nccl=nccl,
        host_sums=host_sums,
    )


def _host_sums(
    exchange: "_Exchange", *, name: str, address: str, timeout_s: float
) -> HostSums | None:
    """Returns the sums of ranks that are all on one host; None where they are not."""
    sums = join_host_sums(exchange, node=address, timeout_s=timeout_s)
    if isinstance(sums, str):
        logger.info("sums_by_messages group=%s reason=%s", name, sums)
        return None
    return sums


def _sum_in_memory(
    plane: NcclPlane,
    exchange: "_Exchange",
    *,
    size: int,
    device: torch.device,
    name: str,
    address: str,
) -> None:
    """Makes the plane sum in the ranks' memory, if all ranks can."""
    from eesd_dist.transport.symmetric.sums import join_symmetric

    try:
        symmetric = join_symmetric(exchange, device=device, node=address)
    except BaseException:
        plane.abort()
        raise
    if isinstance(symmetric, str):
        logger.info("sums_over_nccl group=%s reason=%s", name, symmetric)
        return
    num_nodes = size // symmetric.size
    logger.info("sums_in_memory group=%s nodes=%d", name, num_nodes)
    if num_nodes == 1:
        plane.sum_in_memory(symmetric)
        return
    node, local_rank = divmod(exchange.rank, symmetric.size)
    plane.sum_over_nodes(
        symmetric,
        exchange.store(f"nccl local rank {local_rank}", timeout_s=exchange.timeout_s),
        node=node,
        num_nodes=num_nodes,
        timeout_s=exchange.left_s(),
    )


def _connect(
    exchange: "_Exchange", *, address: str, device: torch.device, refusals: RefusedConnections
) -> LinkPlane:
    """Connects the CPUs of all ranks. Raises PeerLost, EngineError if this rank cannot listen, or
    ConfigError if the ranks' devices are not of one type: NCCL would wait for those that do not
    call it."""
    rank, size = exchange.rank, len(exchange.members)
    try:
        listener = PeerListener(
            address,
            rank=rank,
            peers=range(rank + 1, size),
            proof=exchange.proof,
            refusals=refusals,
        )
    except OSError as error:
        raise EngineError(
            f"{exchange.members[rank]} cannot listen on {address}: {error.strerror or error}"
        ) from error
    links: dict[int, Link] = {}
    try:
        ends = exchange.ends(_End(address, listener.at, device.type))
        _require_one_type(exchange.members, [end.device_type for end in ends])
        for peer in range(rank):
            links[peer] = exchange.connected(peer, ends[peer].at)
        while len(links) < size - 1:
            missing = [peer for peer in range(rank + 1, size) if peer not in links]
            peer, link = exchange.accepted(listener, missing)
            links[peer] = link
    except BaseException:
        LinkPlane(links).abort()
        raise
    finally:
        listener.close()
    return LinkPlane(links)


def _require_one_type(members: Sequence[str], device_types: Sequence[str]) -> None:
    if len(set(device_types)) < 2:
        return
    devices = ", ".join(
        f"{member}: {device_type}"
        for member, device_type in zip(members, device_types, strict=True)
    )
    raise ConfigError(
        f"ranks of one group compute on different types of device ({devices}): give every rank a "
        "GPU (placement.draft.num_gpus, placement.verify.num_gpus), or set model.device to cpu"
    )


class _End(Record, frozen=True):
    """A rank's node, where it listens, and its type of device, as the rank reports them."""

    node: str
    at: SocketAddress
    device_type: str


_ends = Decoder(_End)


class _Exchange:
    """Exchange of the ranks of one group through the store while they join."""

    def __init__(
        self,
        store: StoreClient,
        *,
        prefix: str,
        rank: int,
        members: tuple[str, ...],
        timeout_s: float,
        operation: str,
    ) -> None:
        self.members = members
        """Members with their nodes, once these are known."""
        self.rank = rank
        self.timeout_s = timeout_s
        self._operation = operation
        self._store = store
        self._prefix = prefix
        self._deadline = time.monotonic() + timeout_s

    def ends(self, own_end: _End) -> list[_End]:
        """Returns where each rank listens."""
        ends = [_ends.decode(report) for report in self.gathered("end", encode(own_end))]
        self.members = tuple(
            f"{name} on {end.node}" for name, end in zip(self.members, ends, strict=True)
        )
        return ends

    def connected(self, peer: int, at: SocketAddress) -> Link:
        """Returns the link to a lower rank. Raises PeerLost."""
        try:
            connection = connect_to_peer(
                at,
                rank=self.rank,
                peer=peer,
                proof=self.proof,
                deadline=self._deadline,
                is_cancelled=lambda: self._store.is_closed,
            )
        except Stranger as error:
            reason = "the process in its place does not know the epoch's secret"
            raise self.lost(peer, reason) from error
        except TimeoutError as error:
            raise self._late(peer) from error
        except ConnectionError as error:
            raise self.lost(peer, first_line(error)) from error
        return Link(connection)

    def accepted(self, listener: PeerListener, missing: Sequence[int]) -> tuple[int, Link]:
        """Returns the next higher rank that connects, and the link to it. Raises PeerLost that
        names one of those that are missing."""
        while time.monotonic() < self._deadline:
            if self._store.is_closed:
                raise self.lost(missing[0], "joining was cancelled")
            arrived = listener.accept(timeout_s=min(self.left_s(), _POLL_S))
            if arrived is not None:
                return arrived.rank, Link(arrived.connection)
        raise self._late(missing[0])

    def store(self, name: str, *, timeout_s: float) -> Store:
        """Returns the store as torch knows stores; keep it as long as torch has it."""
        return _TorchStore(self._store, prefix=f"{self._prefix}/{name}", timeout_s=timeout_s)

    def left_s(self) -> float:
        return max(self._deadline - time.monotonic(), _SHORTEST_S)

    def proof(self, prover: int, verifier: int, *, nonces: bytes) -> bytes:
        """Returns the proof of the secret from one rank to another."""
        secret = self._store.at.secret
        return peer_proof(
            secret, group=self._prefix, prover=prover, verifier=verifier, nonces=nonces
        )

    @contextmanager
    def naming_the_lost(self) -> Iterator[None]:
        """Raises PeerLost, or EngineError when this rank's own device fails."""
        try:
            yield
        except OWN_FAILURES as error:
            member = self.members[self.rank]
            raise own_failure(error, member=member, operation=self._operation) from error
        except OSError as error:
            is_timeout = isinstance(error, TimeoutError)
            reason = f"no answer within {self.timeout_s:g} s" if is_timeout else first_line(error)
            raise self._lost("the rendezvous store", reason) from error
        except RuntimeError as error:
            others = self.members[: self.rank] + self.members[self.rank + 1 :] or self.members
            raise self._lost(" or ".join(others), first_line(error)) from error

    def gathered(self, name: str, own_value: bytes) -> tuple[bytes, ...]:
        """Returns every rank's value. Raises PeerLost that names a missing rank."""
        keys = [f"{self._prefix}/{name}/{rank}" for rank in range(len(self.members))]
        self._store.put(keys[self.rank], own_value)
        try:
            return self._store.get(*keys, timeout_s=self.left_s())
        except KeysMissing as error:
            raise self._late(keys.index(error.keys[0])) from error

    def lost(self, peer: int, reason: str) -> PeerLost:
        return self._lost(self.members[peer], reason)

    def _late(self, peer: int) -> PeerLost:
        return self.lost(peer, f"it did not join within {self.timeout_s:g} s")

    def _lost(self, peer: str, reason: str) -> PeerLost:
        return PeerLost(peer=peer, operation=self._operation, reason=reason)


class _TorchStore(Store):
    """The part of a rendezvous store below a prefix, for torch's process groups."""

    def __init__(self, client: StoreClient, *, prefix: str, timeout_s: float) -> None:
        super().__init__()
        self._client = client
        self._prefix = prefix
        self._timeout_s = timeout_s

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch gives bytes
        self._client.put(f"{self._prefix}/{key}", value)

    def get(self, key: str) -> bytes:
        return self._values([key], self._timeout_s)[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._values(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        """NCCL's monitor would look for signals that are never sent."""
        return False

    def _values(self, keys: Sequence[str], timeout_s: float) -> tuple[bytes, ...]:
        try:
            return self._client.get(*(f"{self._prefix}/{key}" for key in keys), timeout_s=timeout_s)
        except KeysMissing as error:
            raise DistStoreError(str(error)) from error
