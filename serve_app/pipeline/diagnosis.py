"""Causes of broken epochs: which worker failed first, and which cannot stay."""

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from eesd_dist.errors import ConfigError, EesdError, EngineError, PeerLost
from eesd_dist.workers.messages import LoopEnd
from serve_app.pipeline.worker import Worker
from serve_app.pipeline.workers import Workers


class Diagnosis:
    """Observes the epochs of one pipeline."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.broken: set[str] = set()
        """Slots with a worker that cannot stay: its loop ended with a bug, with unknown damage, or
        it makes no progress."""
        self._accused: set[str] = set()
        """Group names of workers for which others have waited in vain while they went on: they are
        probably stuck."""
        self.crashed_leaders: deque[str] = deque(maxlen=8)
        """Names of the latest leaders that have reported their own crash."""

    async def trouble(self, engaged: Sequence[Worker], *, epoch: int) -> EesdError:
        """Waits until the epoch of the `engaged` workers is broken; returns the cause."""
        ends = {
            worker: asyncio.ensure_future(worker.ask("ended", f"epoch {epoch}"))
            for worker in engaged
        }
        deaths = [worker.death for worker in engaged]
        failures = [worker.failure for worker in engaged]
        try:
            await asyncio.wait(
                {*ends.values(), *deaths, *failures}, return_when=asyncio.FIRST_COMPLETED
            )
            if not any(m.is_dead or m.failure.done() for m in engaged):
                await asyncio.wait(
                    deaths,
                    timeout=self._workers.spec.timings.grace_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
        finally:
            for pending in ends.values():
                pending.cancel()  # no effect on those that are done
        errors = {m: _result(end) for m, end in ends.items() if end.done()}
        self.broken = {
            m.slot.name
            for m, error in errors.items()
            if error is not None and not isinstance(error, PeerLost)
        }
        self._accused = {
            name
            for error in errors.values()
            if isinstance(error, PeerLost)
            for name in _members_in(error)
        } - {name for worker in errors for name in _members(worker)}
        for worker in engaged:
            if worker.failure.done():
                errors[worker] = worker.failure.result()
                self.broken.add((worker.host or worker).slot.name)
        return await self._own_fault(engaged) or _culprit(engaged, errors, epoch=epoch)

    async def _own_fault(self, engaged: Sequence[Worker]) -> EesdError | None:
        """Returns the crash that the process of a dead worker has reported, if one has."""
        for worker in engaged:
            if worker.is_dead and (crash := await self._workers.crash_of(worker)):
                if worker is engaged[0]:
                    self.crashed_leaders.append(worker.name)
                return EngineError(f"{worker.label} crashed: {crash}")
        return None

    def is_suspect(self, worker: Worker) -> bool:
        """Returns whether the worker has failed, or is probably stuck."""
        return worker.failure.done() or not self._accused.isdisjoint(_members(worker))

    def clear(self) -> None:
        """Forgets the workers of an epoch that has ended."""
        self.broken.clear()
        self._accused.clear()

    @contextmanager
    def blaming(self, slot: str | None) -> Iterator[None]:
        """Marks the worker of this slot as broken if it fails by itself, since it would fail in the
        next epoch too."""
        try:
            yield
        except (PeerLost, ConfigError):
            raise
        except EesdError:
            if slot is not None:
                self.broken.add(slot)
            raise


def _culprit(
    engaged: Sequence[Worker], ends: Mapping[Worker, EesdError | None], *, epoch: int
) -> EesdError:
    """Returns the most specific known cause: a death, then a bug, then an error of a rank."""
    for worker in engaged:
        if worker.is_dead:
            return worker.loss(f"epoch {epoch}")
    failures = [(worker, error) for worker, error in ends.items() if error is not None]
    if not failures:
        return EngineError(f"epoch {epoch} of this pipeline ended by itself")
    bugs = [error for _, error in failures if not isinstance(error, PeerLost)]
    of_ranks = [error for worker, error in failures if worker.slot.rank is not None]
    return [*bugs, *of_ranks, failures[0][1]][0]


def _members(worker: Worker) -> set[str]:
    """Returns the names that a worker has in the groups of an epoch."""
    slot = worker.slot
    names = {f"{slot.stage} rank {slot.rank or 0}"}
    if slot.rank is None and slot.mode == "shared":
        names.add("verify rank 0")
    return names


def _members_in(error: PeerLost) -> list[str]:
    """Returns the members that an error of a group names."""
    return [name.split(" on ")[0] for name in error.peer.split(" or ")]


def _result(end: "asyncio.Future[LoopEnd]") -> EesdError | None:
    if end.cancelled():
        return None
    error = end.exception()
    if error is not None:
        return error if isinstance(error, EesdError) else EngineError(repr(error))
    return end.result().error
