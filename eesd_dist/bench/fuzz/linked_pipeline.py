"""The engine of one case with ranks in processes: what a service runs, without Ray.

This process has draft rank 0 (`EngineLeader`), the others run the actors of ranks. Epochs start and
end as in a service, over the same groups and links. Faults happen in the middle of rounds.
"""

import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from eesd_dist.bench.fuzz.cases import EngineSetup, Fault, Loss, World, engine_config
from eesd_dist.bench.fuzz.pipeline import AnyPipeline, masks_of
from eesd_dist.bench.fuzz.rank_processes import RankProcess, RankProcesses
from eesd_dist.engine.core import EngineCore, StepResult
from eesd_dist.errors import EesdError, PeerLost
from eesd_dist.model.spec import ModelSpec
from eesd_dist.schedule.page_leases import PageReservation
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.workers.draft_leader import EngineLeader, LeaderEpoch
from eesd_dist.workers.messages import Epoch, LoopEnd, PageLink, PagePart, StageName

Slot = tuple[StageName, int]
LEADER: Slot = ("draft", 0)

_LOAD_S = 120.0
_ANSWER_S = 15.0
"""Time for an answer, in addition to what the deadlines of an epoch allow."""
_STARTS = 3
"""Tries of starting an epoch."""
_MOST_OWN_LOSSES = 3
"""Lost peers of one engine without a fault: a busy machine may miss a short deadline."""


class _RunningFault:
    """A fault, from its beginning in a separate thread until the recovery."""

    def __init__(self, fault: Fault, act: Callable[[], None]) -> None:
        self.fault = fault
        self._timer = threading.Timer(fault.delay_s, act)
        self._timer.start()

    def wait(self) -> None:
        self._timer.join()


class LinkedPipeline:
    """Both stages and their engine, with ranks in processes."""

    def __init__(
        self, world: World, setup: EngineSetup, *, folder: Path, processes: RankProcesses
    ) -> None:
        self._config = engine_config(world, setup, folder=folder)
        self._setup = setup
        self._timeout_s = setup.link.timeout_s
        self._spec = ModelSpec.from_folder(folder)
        self._processes = processes
        stages: tuple[tuple[StageName, int], ...] = (
            ("draft", world.draft_ranks),
            ("verify", world.verify_ranks),
        )
        slots: list[Slot] = [(stage, rank) for stage, size in stages for rank in range(size)]
        if setup.link.is_shared:
            slots.remove(("verify", 0))
        self._addresses = {slot: _address(at, setup) for at, slot in enumerate(slots)}
        self._ranks: dict[Slot, RankProcess] = {}
        self._epoch_number = 0
        self._epoch: LeaderEpoch | None = None
        """None between epochs."""
        self._scheduled: Fault | None = None
        self._running: _RunningFault | None = None
        self._steps_left = 0
        self._num_own_losses = 0
        self.counts: Counter[str] = Counter({f"engines with sums in {setup.link.sums}": 1})
        self.counts["engines with stages in one process"] += setup.link.is_shared
        self._leader = self._new_leader()
        try:
            self.engine = self._start()
        except BaseException:
            self.abandon()
            raise

    def step(self) -> StepResult:
        self._count_step()
        assert self._epoch is not None, "an epoch runs between steps"
        try:
            if self._running is not None and not self._ranks:  # no link of a single process is cut
                raise PeerLost(peer=_name(LEADER), operation="step", reason="its process has died")
            return self._epoch.step(wait_s=0.0)
        except PeerLost as error:
            self._recover(error)
            return StepResult()

    def lose(self, trouble: Loss | Fault) -> bool:
        """Schedules a fault. It is counted when it happens, so that this returns False."""
        is_free = self._scheduled is None and self._running is None
        if is_free and isinstance(trouble, Fault) and _slot_of(trouble) in self._addresses:
            self._scheduled, self._steps_left = trouble, trouble.after
        return False

    def fits(self, target: AnyPipeline) -> bool:
        assert isinstance(target, LinkedPipeline)
        if list(self._addresses) != list(target._addresses):
            return False
        with suppress(PeerLost):  # the next step of one of them notices it
            layouts = zip(self._on_ranks("kv_layout"), target._on_ranks("kv_layout"), strict=True)
            return all(source.why_not(other) is None for source, other in layouts)
        return False

    def copy_pages(
        self, target: AnyPipeline, reservation: PageReservation, *, chunk_bytes: int
    ) -> bool:
        """Copies over links between peer ranks, in chunks of their size. A fault of either
        pipeline may end it."""
        del chunk_bytes
        assert isinstance(target, LinkedPipeline)
        timeout_s = self._timeout_s
        meeting = target._leader.sharing.meet(lasts_s=2 * timeout_s)

        def link(slot: Slot, end: Literal[0, 1]) -> PageLink:
            name = _name(slot)
            return PageLink(
                meeting=meeting,
                rank_name=name,
                ends=(f"{name} of the source", f"{name} of the target"),
                end=end,
                backend="link",
                timeout_s=timeout_s,
            )

        def part(end: Literal[0, 1]) -> PagePart:
            return PagePart(
                link=meeting.number,
                number=reservation.number,
                epoch=reservation.epoch,
                pages=tuple(move[end] for move in reservation.moves),
                timeout_s=timeout_s,
            )

        try:
            _in_threads(
                [
                    *self._calls("open_link", lambda slot: link(slot, 0)),
                    *target._calls("open_link", lambda slot: link(slot, 1)),
                ]
            )
            _in_threads(
                [
                    *self._calls("send_pages", lambda _: part(0)),
                    *target._calls("receive_pages", lambda _: part(1)),
                ]
            )
        except EesdError:
            self.counts["migrations that failed"] += 1
            return False
        finally:
            for pipeline in (self, target):
                with suppress(EesdError):
                    pipeline._on_ranks("close_link", meeting.number)
        return True

    def close(self) -> None:
        """Ends both stages after their work. A loop that ended with an error is a failure, unless
        a fault happened since the last recovery."""
        self._scheduled = None
        if self._running is None:
            self.engine.close()
            self._require_ended(allows_losses=False)
        self.abandon()

    def abandon(self) -> None:
        self._settle_fault(goes_on=False)
        self._leave()
        for process in self._ranks.values():
            self._processes.give_back(process)
        self._ranks.clear()

    # Epochs.

    def _new_leader(self) -> EngineLeader:
        leader = EngineLeader(
            self._config,
            Tracing(),
            masks=masks_of(self._spec, self._setup.link),
            address=self._addresses[LEADER],
            holds_verify_rank=self._setup.link.is_shared,
        )
        leader.prepare(cost=self._setup.cost.to_json())
        return leader

    def _start(self) -> EngineCore:
        """Starts an epoch with all ranks, and returns its engine."""
        for left in reversed(range(_STARTS)):
            try:
                self._fill()
                self._epoch = self._meet()
                return self._epoch.engine
            except PeerLost:
                self._leave()
                if not left:
                    raise
                self.counts["failed starts"] += 1
        raise AssertionError("unreachable")

    def _fill(self) -> None:
        """Gives every slot a process with loaded weights."""
        for slot, address in self._addresses.items():
            if slot == LEADER or slot in self._ranks:
                continue
            self._ranks[slot] = process = self._processes.take()
            process.call("build", self._config, *slot, address, timeout_s=_LOAD_S)
        _in_threads([self._call(slot, "prepare", timeout_s=_LOAD_S) for slot in self._ranks])

    def _meet(self) -> LeaderEpoch:
        self._epoch_number += 1
        epoch = Epoch(
            number=self._epoch_number,
            store=self._leader.host_store(),
            num_verify_ranks=self._config.parallel.verify_tensor_parallel_size,
            num_draft_ranks=self._config.parallel.draft_tensor_parallel_size,
            timeout_s=self._timeout_s,
            num_pages=self._setup.num_pages,
        )
        joins = [self._call(slot, "join", epoch, timeout_s=_LOAD_S) for slot in self._ranks]
        _in_threads([lambda: self._leader.connect(epoch), *joins])
        return self._leader.join(epoch, new_engine=False)

    def _leave(self) -> None:
        """Ends the epoch, if there is one. Processes that do not leave it are killed."""
        if self._epoch is not None:
            self._epoch.abort()
            self._epoch = None
        self._leader.disconnect()
        for slot in list(self._ranks):
            try:
                has_left = self._call(slot, "leave")()
            except EesdError:
                has_left = False
            if not has_left:
                self._kill(slot)

    def _kill(self, slot: Slot) -> None:
        self._ranks.pop(slot).kill()

    # Faults.

    def _count_step(self) -> None:
        if self._scheduled is None:
            return
        if self._steps_left == 0:
            fault, self._scheduled = self._scheduled, None
            self._running = _RunningFault(fault, lambda: self._act(fault))
        self._steps_left -= 1

    def _act(self, fault: Fault) -> None:
        slot = _slot_of(fault)
        assert self._epoch is not None, "an epoch runs between steps"
        if slot == LEADER:
            self._epoch.abort()
        elif fault.kind == "cut":
            with suppress(EesdError):
                self._call(slot, "leave")()
        else:
            number = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
            self._ranks[slot].signal(number)
        self.counts[f"trouble {fault.kind}"] += 1

    def _settle_fault(self, *, goes_on: bool = True) -> bool:
        """Removes what the fault has left; returns whether there was one."""
        if self._running is None:
            return False
        self._running.wait()
        fault, self._running = self._running.fault, None
        slot = _slot_of(fault)
        if slot == LEADER:
            if fault.kind == "kill":
                self.engine.masks.close()
                self._leave()
                if goes_on:
                    self._leader = self._new_leader()
        elif fault.kind == "kill" or fault.is_replaced:
            self._kill(slot)
        elif fault.kind == "stop":
            self._ranks[slot].signal(signal.SIGCONT)
        return True

    def _recover(self, loss: PeerLost) -> None:
        """Starts the next epoch after a loss. Raises the error of a rank that failed otherwise."""
        self.counts["lost stages"] += 1
        if not self._settle_fault():
            self.counts["losses without a fault"] += 1
            self._num_own_losses += 1
            if self._num_own_losses > _MOST_OWN_LOSSES:
                raise loss
        if self._epoch is not None:
            self._epoch.abort()
        self._require_ended(allows_losses=True)
        self._leave()
        self.engine = self._start()

    def _require_ended(self, *, allows_losses: bool) -> None:
        """Waits until the loops of all ranks have ended. Raises the errors that they ended with."""
        for slot in self._ranks:
            end = self._call(slot, "ended", timeout_s=self._timeout_s + _ANSWER_S)()
            assert isinstance(end, LoopEnd)
            is_lost_peer = isinstance(end.error, PeerLost)
            if end.error is not None and not (is_lost_peer and allows_losses):
                raise end.error

    # Calls to ranks.

    def _call(
        self, slot: Slot, method: str, *args: object, timeout_s: float = _ANSWER_S
    ) -> Callable[[], Any]:
        rank = self._ranks[slot]
        return lambda: rank.call(method, *args, timeout_s=timeout_s)

    def _calls(
        self, method: str, argument: Callable[[Slot], object] | None = None
    ) -> list[Callable[[], Any]]:
        """Returns the calls of this method for all ranks, in the order of their slots."""
        pages = self._leader.pages
        own: Mapping[str, Callable[..., object]] = {
            "kv_layout": pages.layout,
            "open_link": pages.open,
            "send_pages": pages.send,
            "receive_pages": pages.receive,
            "close_link": pages.close,
        }

        def call(slot: Slot) -> Callable[[], Any]:
            args = () if argument is None else (argument(slot),)
            if slot == LEADER:
                return lambda: own[method](*args)
            return self._call(slot, method, *args, timeout_s=2 * self._timeout_s)

        return [call(slot) for slot in self._addresses]

    def _on_ranks(self, method: str, *args: object) -> list[Any]:
        return _in_threads(self._calls(method, (lambda _: args[0]) if args else None))


def _address(at: int, setup: EngineSetup) -> str:
    """Returns a loopback address: of one host, or of two that ranks are on alternately."""
    return "127.0.0.1" if setup.link.sums == "memory" else f"127.0.0.{1 + at % 2}"


def _slot_of(fault: Fault) -> Slot:
    return fault.stage, fault.rank


def _name(slot: Slot) -> str:
    stage, rank = slot
    return f"{stage} rank {rank}"


def _in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """Returns the results of calls that run at the same time, or raises the first error after all
    have ended."""
    with ThreadPoolExecutor(max(1, len(calls))) as threads:
        running = [threads.submit(call) for call in calls]
    return [call.result() for call in running]
