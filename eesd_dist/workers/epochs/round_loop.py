"""The drafting actor's loop in one epoch: rounds, their results, and the loop's progress."""

import asyncio
import threading
from collections.abc import Callable

from eesd_dist.workers.epochs.loop import ABORT_WAIT_S, LoopThread
from eesd_dist.workers.roles import DraftEpoch, StepLike

_IDLE_WAIT_S = 0.25
_NUM_QUIET = 2
"""Steps in a row without a result: one may have begun a round; after two none is in flight."""


class RoundLoop:
    """Owns the round loop of one epoch, and stops it."""

    def __init__(
        self, draft_epoch: DraftEpoch, *, epoch: int, name: str, deliver: Callable[[StepLike], None]
    ) -> None:
        """Begins at once. `deliver` is called in the event loop."""
        self.draft_epoch = draft_epoch
        self.epoch = epoch
        self._num_computed = 0
        """Tokens committed and prompt rows computed; written by the loop's thread alone, as the two
        below."""
        self._num_waits = 0
        """Turns in which nothing could run before a mask was there: each mask has a deadline."""
        self._deliver = deliver
        self._event_loop = asyncio.get_running_loop()
        self._stopping = threading.Event()
        self._halting = threading.Event()
        self._num_turns = 0
        self._loud_turn = 0
        """The last turn with a result; both are written by the loop's thread alone."""
        self._disturbed_turn = 0
        self.thread = LoopThread(self._turn, name=name)

    @property
    def is_quiet(self) -> bool:
        """Returns whether no round is in flight with a request that was there at `disturb`."""
        return self._num_turns - max(self._loud_turn, self._disturbed_turn) > _NUM_QUIET

    @property
    def has_computed(self) -> bool:
        """True if a token was committed, or a prompt row computed."""
        return self._num_computed > 0

    def progress_of(self, *, has_work: bool) -> int:
        """Returns a number that changes as long as the loop makes progress: with work, a turn that
        computes nothing is none."""
        return self._num_computed + self._num_waits if has_work else -self._num_turns

    def disturb(self) -> None:
        """Notes that the engine's requests have changed."""
        self._disturbed_turn = self._num_turns

    def _turn(self) -> None:
        while not self._stopping.is_set():
            result = self.draft_epoch.step(wait_s=_IDLE_WAIT_S)
            self._num_turns += 1
            if result.rounds or result.emissions:
                self._loud_turn = self._num_turns
                self._num_computed += sum(r.num_emitted + r.num_prefill_rows for r in result.rounds)
                self._event_loop.call_soon_threadsafe(self._deliver, result)
                continue
            self._num_waits += result.awaits_masks
            if self._halting.is_set() and self._num_turns - self._loud_turn >= _NUM_QUIET:
                return

    async def halt(self) -> bool:
        """Ends the loop once no round is in flight; returns whether it has ended."""
        self._halting.set()
        return await self.thread.ended_within(ABORT_WAIT_S)

    async def stop(self) -> bool:
        """Ends the loop; returns whether it has ended."""
        self._stopping.set()
        self.draft_epoch.abort()
        return await self.thread.ended_within(ABORT_WAIT_S)
