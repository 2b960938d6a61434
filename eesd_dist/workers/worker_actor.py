"""The calls that drafting actors and ranks answer in the same way: process, lease and KV pages."""

import asyncio
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Protocol

from eesd_dist.model.slow_kernels import slow_kernels
from eesd_dist.schedule.page_leases import KvLayout, PageTraffic
from eesd_dist.workers.crash_report import crash_report
from eesd_dist.workers.epochs.joining import Joining
from eesd_dist.workers.load_watch import LoadWatch
from eesd_dist.workers.messages import (
    Lease,
    PageLink,
    PagePart,
    ProcessInfo,
    WorkerIdentity,
    WorkerStatus,
)
from eesd_dist.workers.process import process_info, set_log_level
from eesd_dist.workers.roles import PageTransfer
from eesd_dist.workers.tenure import Tenure


class Role(Protocol):
    """Computation of this process, as far as these calls need it."""

    @property
    def pages(self) -> PageTransfer: ...
    @property
    def loading(self) -> LoadWatch: ...


class WorkerActor(ABC):
    """Base of `DraftActor` and `RankActor`."""

    def __init__(self, *, name: str, role: Role, tenure: Tenure | None) -> None:
        """`tenure` is its lease; a fallback has none, and ends with its host."""
        self._name = name
        self._role = role
        self._tenure = tenure
        self._joining = Joining(name=name)

    async def process_info(self) -> ProcessInfo:
        return process_info()

    async def crash_report(self, pid: int) -> str:
        """Returns what a dead process of this node has reported; empty for nothing."""
        return await asyncio.to_thread(crash_report, pid)

    async def forever(self) -> None:
        """Never returns: a pending call is how the supervisor learns that this process has died."""
        await asyncio.Event().wait()

    async def claim(self, lease: Lease, of: str) -> WorkerIdentity:
        """Passes this worker from a dead supervisor to another. Raises LeaseLost when a third one
        was faster."""
        return self._leased().claim(lease, of=of)

    async def beat(self, lease: Lease) -> WorkerStatus:
        """Renews the lease, and reports progress. Raises LeaseLost for an earlier supervisor."""
        if self._tenure is not None:
            self._tenure.renew(lease)
            set_log_level(lease.log_level)
        load = self._role.loading.report()
        return replace(
            self._in_epoch() or self._joining.status(load),
            load=load,
            num_moved=self._role.pages.num_moved,
            slow_kernels=slow_kernels(),
        )

    async def take_slot(self, slot: str, rank: int | None) -> None:
        """Makes a spare the worker of this slot, where it joins the next epoch."""
        del rank
        tenure = self._leased()
        tenure.take_slot(slot)
        self._name = f"{slot} of {tenure.identity.pipeline}"

    async def kv_layout(self) -> KvLayout:
        """Returns the layout that the peer rank's in another pipeline must match before pages can
        migrate."""
        return await asyncio.to_thread(self._role.pages.layout)

    async def open_link(self, link: PageLink) -> None:
        """Connects to the peer rank in another pipeline."""
        await asyncio.to_thread(self._role.pages.open, link)

    async def send_pages(self, share: PagePart) -> PageTraffic:
        """Sends this rank's part of pages that are leased to another pipeline."""
        return await asyncio.to_thread(self._role.pages.send, share)

    async def receive_pages(self, share: PagePart) -> PageTraffic:
        """Receives this rank's part of another pipeline's pages, while rounds go on."""
        return await asyncio.to_thread(self._role.pages.receive, share)

    async def close_link(self, number: str) -> None:
        await asyncio.to_thread(self._role.pages.close, number)

    @abstractmethod
    def _in_epoch(self) -> WorkerStatus | None:
        """Returns the progress of the running epoch; None between epochs."""

    def _leased(self) -> Tenure:
        assert self._tenure is not None, "a fallback is not claimed"
        return self._tenure
