"""Admission: turns a request into a live one, or refuses it.

A request is refused when it can never be served, or when the queue has no room for its caller.
"""

from collections.abc import Callable, Set

from eesd_dist.config import SchedulerConfig, TreeConfig
from eesd_dist.errors import QueueFull
from eesd_dist.schedule.fairness import WaitingRequests
from eesd_dist.schedule.gate import Gate
from eesd_dist.schedule.live import LiveRequest, salt_of
from eesd_dist.schedule.page_leases import LeasedPages
from eesd_dist.types import Request


class Admission:
    """The limits of one engine, and the exit head that new requests draft with."""

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        gate: Gate,
        tree: TreeConfig,
        max_draft_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._max_waiting = config.max_waiting
        self._gate = gate
        self._tree = tree
        self._max_draft_tokens = max_draft_tokens
        self._clock = clock
        self._num_tickets = 0
        self.drafter = 0
        """Number of the exit head."""

    def check(self, request: Request) -> None:
        """Raises RequestError for a request that can never be served."""
        self._gate.check(request)

    def check_room(self, caller: str, waiting: WaitingRequests, callers: Set[str]) -> None:
        """Raises QueueFull if the queue is full and this caller has its share of it. Since a caller
        gets its share of a full queue too, the queue may reach twice its size, and no more."""
        limit, num_waiting = self._max_waiting, len(waiting)
        if num_waiting < limit:
            return
        num_callers = len(callers | {caller})
        share = 0 if num_callers == 1 else max(1, limit // num_callers)
        if waiting.num_of(caller) >= share or num_waiting >= 2 * limit:
            raise QueueFull(num_waiting=num_waiting, limit=limit)

    def admit(self, request: Request) -> LiveRequest:
        """Returns the request with the next ticket."""
        live = LiveRequest(
            request,
            ticket=self._num_tickets,
            arrival_s=self._clock(),
            max_model_len=self._gate.max_model_len,
            max_draft_tokens=self._max_draft_tokens,
            tree=self._tree.shape_of(request.speculation.tree),
            max_tree_nodes=self._tree.max_nodes,
            drafter=self.drafter,
        )
        self._num_tickets += 1
        return live

    def salt_of(self, leased: LeasedPages) -> str:
        """Returns the salt under which another pipeline's pages are found here."""
        return salt_of(
            drafts=leased.drafts and self._max_draft_tokens > 0,
            drafter=self.drafter,
            cache_salt=leased.cache_salt,
        )
