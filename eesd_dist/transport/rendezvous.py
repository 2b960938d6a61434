"""Rendezvous of ranks: one store in a long-lived process, one group per epoch.

The store is needed only while a group is being built; existing groups do not use it. Nothing here
decides which ranks belong to an epoch. Each rank connects to the store separately: a client that
waits for a key blocks all threads that share it. A store on a frozen host accepts connections and
never answers, and torch's client then waits without a deadline: its connection is cut when the
deadline has passed.
"""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import (  # type: ignore[attr-defined]  # TCPStore: at run time only
    DistError,
    DistNetworkError,
    DistStoreError,
    TCPStore,
)
from torch.distributed.distributed_c10d import PrefixStore, Store

from eesd_dist.errors import PeerLost
from eesd_dist.transport.gloo import LISTENING, Address, GlooDevice, GlooPlane, cut_connections
from eesd_dist.transport.group import OWN_FAILURES, ProcessGroup, own_failure
from eesd_dist.transport.nccl import NcclPlane

_RETRY_S = 0.1
_GRACE_S = 0.3
"""Delay of the cut, so that waits with a deadline of their own fail first, with a better error."""


class StoreHost:
    """Owns the store: keep it while groups are being built. It listens on `address` alone."""

    def __init__(
        self, *, address: str = "127.0.0.1", port: int = 0, timeout_s: float = 20.0
    ) -> None:
        family, *_, bound = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with LISTENING:
            listener = socket.create_server(bound[:2], family=family)
        self.address = address
        self.port: int = listener.getsockname()[1]
        self._store = TCPStore(
            address,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    @property
    def store(self) -> Store:
        """A client of the store, for a rank in this process."""
        return self._store


def connect_store(address: str, port: int, *, timeout_s: float) -> Store:
    """Returns a client of the store at address:port, for one rank. Raises PeerLost."""
    deadline = time.monotonic() + timeout_s
    _wait_until_reachable(address, port, timeout_s=timeout_s)
    left_s = max(deadline - time.monotonic(), _RETRY_S)
    try:
        with _cut_off(address, port, after_s=left_s):
            return TCPStore(
                address,
                port,
                is_master=False,
                timeout=timedelta(seconds=left_s),
                wait_for_workers=False,
            )
    except DistError as error:
        late = time.monotonic() >= deadline
        reason = f"no answer within {timeout_s:g} s" if late else _first_line(error)
        raise _store_lost(address, port, "connecting", reason=reason) from error


def leave_store(address: str, port: int) -> None:
    """Closes this process's connections to the store: building groups there raises PeerLost."""
    cut_connections(address, port)


def build_group(
    store: Store,
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
) -> ProcessGroup:
    """Joins `size` ranks that call this with the same epoch and name.

    `timeout_s` is the deadline of the group's waits; `join_timeout_s` that of joining (default: the
    same), which includes waiting for ranks that are still loading their weights.
    `address` is the one at which the other ranks reach this host. `members` are the ranks' names
    in errors, stage and rank ("verify rank 0"); without them ranks are named after the group. The
    ranks' nodes, exchanged here, are added to the names. `ordered_sums`: sums are taken in rank
    order on GPUs too (`NcclPlane`); on CPUs they always are. Raises PeerLost, or EngineError when
    this rank's own device fails.
    """
    names = tuple(members or (f"{name} rank {each}" for each in range(size)))
    assert len(names) == size, f"{len(names)} names for a group of {size} ranks"
    device = torch.device(device)
    join_s = timeout_s if join_timeout_s is None else join_timeout_s
    shelf = PrefixStore(f"epoch {epoch}/{name}", store)
    gloo_device = GlooDevice(address)
    joining = f"joining group {name} of epoch {epoch}"
    deadline = time.monotonic() + join_s
    with _cut_off(*_address_of(store), after_s=join_s):
        endpoints = _exchange_endpoints(
            shelf,
            _Endpoint(node=address, listens=gloo_device.addresses),
            rank=rank,
            members=names,
            timeout_s=join_s,
            operation=joining,
        )
        names = tuple(f"{name} on {at.node}" for name, at in zip(names, endpoints, strict=True))
        try:
            gloo = GlooPlane(
                PrefixStore("gloo", shelf),
                rank=rank,
                size=size,
                timeout_s=max(deadline - time.monotonic(), _RETRY_S),
                device=gloo_device,
                peer_addresses=frozenset().union(
                    *(at.listens for peer, at in enumerate(endpoints) if peer != rank)
                ),
            )
            try:
                nccl = (
                    NcclPlane(
                        PrefixStore("nccl", shelf),
                        rank=rank,
                        size=size,
                        timeout_s=timeout_s,
                        join_timeout_s=max(deadline - time.monotonic(), _RETRY_S),
                        device=device,
                        ordered_sums=ordered_sums,
                    )
                    if device.type == "cuda"
                    else None
                )
            except BaseException:
                gloo.abort()
                raise
        except OWN_FAILURES as error:
            raise own_failure(error, member=names[rank], operation=joining) from error
        except RuntimeError as error:
            others = " or ".join(names[:rank] + names[rank + 1 :]) or names[rank]
            raise PeerLost(peer=others, operation=joining, reason=_first_line(error)) from error
    return ProcessGroup(
        name=name,
        epoch=epoch,
        rank=rank,
        members=names,
        timeout_s=timeout_s,
        device=device,
        gloo=gloo,
        nccl=nccl,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Endpoint:
    """A rank's node and listening addresses, as the rank reports them."""

    node: str
    listens: frozenset[Address]

    def encode(self) -> str:
        return "\n".join([self.node, *(f"{host} {port}" for host, port in self.listens)])

    @classmethod
    def decode(cls, text: str) -> "_Endpoint":
        node, *lines = text.splitlines()
        pairs = [line.split() for line in lines]
        return cls(node=node, listens=frozenset((host, int(port)) for host, port in pairs))


def _exchange_endpoints(
    store: Store,
    mine: _Endpoint,
    *,
    rank: int,
    members: Sequence[str],
    timeout_s: float,
    operation: str,
) -> list[_Endpoint]:
    """Returns the endpoints of all ranks. Raises PeerLost that names a missing rank, before Gloo
    begins to wait."""
    deadline = time.monotonic() + timeout_s
    endpoints: list[_Endpoint] = []
    try:
        store.set(f"address/{rank}", mine.encode())
        for peer, member in enumerate(members):
            if peer == rank:
                endpoints.append(mine)
                continue
            key = f"address/{peer}"
            try:
                store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            except DistStoreError as error:
                reason = f"it did not join within {timeout_s:g} s"
                raise PeerLost(peer=member, operation=operation, reason=reason) from error
            endpoints.append(_Endpoint.decode(store.get(key).decode()))
    except DistNetworkError as error:
        late = time.monotonic() >= deadline
        reason = f"no answer within {timeout_s:g} s" if late else _first_line(error)
        raise PeerLost(peer="the rendezvous store", operation=operation, reason=reason) from error
    return endpoints


@contextmanager
def _cut_off(address: str, port: int, *, after_s: float) -> Iterator[None]:
    """Cuts the connections to the store after `after_s`; threads that still wait for it raise."""
    timer = threading.Timer(after_s + _GRACE_S, cut_connections, args=(address, port))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _address_of(store: Store) -> Address:
    """Returns the address of a client's store, behind any number of prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    assert isinstance(store, TCPStore), "groups are built over a TCP store"
    return store.host, store.port


def _wait_until_reachable(address: str, port: int, *, timeout_s: float) -> None:
    """Waits until a plain connection succeeds: TCPStore's own retries outlast their deadline and
    fill the log. Raises PeerLost."""
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            socket.create_connection((address, port), timeout=max(left_s, 0.001)).close()
        except OSError as error:
            if left_s <= _RETRY_S:
                reason = f"not reachable within {timeout_s:g} s ({error})"
                raise _store_lost(address, port, "connecting", reason=reason) from error
            time.sleep(_RETRY_S)
        else:
            return


def _store_lost(address: str, port: int, operation: str, *, reason: str) -> PeerLost:
    return PeerLost(
        peer=f"the rendezvous store at {address}:{port}", operation=operation, reason=reason
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
