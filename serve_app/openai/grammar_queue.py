"""Compiling grammars that are new here, a few at a time, fairly between callers.

A grammar that was compiled before waits for nothing. Callers take turns; the request of a client
that leaves gives up its turn. The queue is bounded, and each caller gets its share of it.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

from eesd_dist.errors import CapacityError

_NUM_AT_ONCE = 2
"""While one grammar is compiled here, the child process tries the next one."""
_MAX_WAITING = 64


class GrammarQueue:
    """Runs the work of compiling in threads; used from one event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_NUM_AT_ONCE, thread_name_prefix="grammar")
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Callers with waiting requests, in the order of their turns."""
        self._num_waiting = 0
        self._num_running = 0

    async def run(self, work: Callable[[], None], *, caller: str) -> None:
        """Runs `work` when it is this caller's turn. Raises CapacityError if too many grammars of
        this caller wait."""
        await self._turn(caller)
        run = copy_context().run  # its log lines are about this request
        compiling = asyncio.get_running_loop().run_in_executor(self._pool, run, work)
        compiling.add_done_callback(self._ended)  # also if the client leaves before that
        await asyncio.shield(compiling)

    async def _turn(self, caller: str) -> None:
        if self._num_running < _NUM_AT_ONCE:
            self._num_running += 1
            return
        self._require_room(caller)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        self._num_waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(caller, turn)
            else:  # its turn came at the same moment
                self._pass_on()
            raise

    def _require_room(self, caller: str) -> None:
        """Raises CapacityError if the queue is full and this caller has its share of it; the queue
        may reach twice its size, since a caller gets its share of a full queue too."""
        num_callers = len(self._waiting.keys() | {caller})
        num_own = len(self._waiting.get(caller, ()))
        share = max(1, _MAX_WAITING // num_callers)
        is_full = self._num_waiting >= _MAX_WAITING
        if (is_full and num_own >= share) or self._num_waiting >= 2 * _MAX_WAITING:
            raise CapacityError(
                f"{num_own} new grammars of this caller wait to be compiled, of "
                f"{self._num_waiting} in all: try again, or use grammars that were compiled before"
            )

    def _leave(self, caller: str, turn: "asyncio.Future[None]") -> None:
        turns = self._waiting[caller]
        turns.remove(turn)
        self._num_waiting -= 1
        if not turns:
            del self._waiting[caller]

    def _ended(self, compiling: "asyncio.Future[None]") -> None:
        if not compiling.cancelled():
            compiling.exception()  # it is raised in `run`, where the client has not left
        self._pass_on()

    def _pass_on(self) -> None:
        """Gives a free place to the next caller."""
        if not self._waiting:
            self._num_running -= 1
            return
        caller, turns = self._waiting.popitem(last=False)
        turn = turns.popleft()
        self._num_waiting -= 1
        if turns:
            self._waiting[caller] = turns
        turn.set_result(None)
