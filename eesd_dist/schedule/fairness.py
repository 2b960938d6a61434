"""Fairness between callers: the request of which one starts next, and which one makes room.

Callers are API keys, as a rule. Slots of the batch are shared by weight: a caller with fewer
running requests than its share gets the place of a request of a caller with more, in the next
round; without that, long texts would keep others waiting until they end. Prompts are computed in
the order of what the callers were served, by the virtual token counter of Sheng et al. 2024
(Fairness in Serving Large Language Models, OSDI, algorithm 2), in rows over weight. Requests of a
lower number of priority come before all others. With one caller and one priority, requests come in
the order of arrival, and make room from the youngest on.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from heapq import merge
from itertools import islice

from eesd_dist.schedule.live import LiveRequest, ticket_of
from eesd_dist.types import RequestId

Class = tuple[int, str]
"""Priority and caller."""


class WaitingRequests:
    """Requests that hold no pages, by class and ticket: a preempted one comes before younger ones.

    `add` and `remove` take time in the number of waiting requests, the rest in that of classes.
    """

    def __init__(self) -> None:
        self._queues: dict[Class, list[LiveRequest]] = {}
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[LiveRequest]:
        """Yields the requests by ticket."""
        return merge(*self._queues.values(), key=ticket_of)

    def add(self, live: LiveRequest) -> None:
        insort(self._queues.setdefault(_class_of(live), []), live, key=ticket_of)
        self._num += 1

    def remove(self, live: LiveRequest) -> None:
        queue = self._queues[_class_of(live)]
        queue.remove(live)
        self._num -= 1
        if not queue:
            del self._queues[_class_of(live)]

    def clear(self) -> None:
        self._queues.clear()
        self._num = 0

    def classes(self) -> Set[Class]:
        return self._queues.keys()

    def find(self, request_id: RequestId) -> LiveRequest | None:
        queues = self._queues.values()
        return next(
            (live for queue in queues for live in queue if live.request_id == request_id), None
        )

    def num_of(self, caller: str) -> int:
        return sum(len(queue) for (_, of), queue in self._queues.items() if of == caller)

    def heads(self, is_ready: Callable[[LiveRequest], bool]) -> Iterator[LiveRequest]:
        """Yields the first one of each class that is ready."""
        for queue in self._queues.values():
            yield from islice(filter(is_ready, queue), 1)


class Fairness:
    """Record of what each caller was served."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        """Rows over weight, of callers with live requests, and of others that had more."""

    def arrived(self, live: LiveRequest, others: Collection[str]) -> None:
        """Notes a request before it waits. `others`: callers with live requests.

        A caller that comes back after a pause has saved nothing, and still has what it took: its
        counter becomes the least of theirs, if it is below that. Where it is alone, it becomes the
        highest there is: what others did not want was not taken from them.
        """
        caller = live.request.caller
        if caller in others:
            return
        present = [self._served.get(name, 0.0) for name in others]
        floor = min(present) if present else max(self._served.values(), default=0.0)
        self._served[caller] = max(self._served.get(caller, floor), floor)
        self._served = {
            name: served
            for name, served in self._served.items()
            if name in others or name == caller or served > floor
        }

    def charge(self, live: LiveRequest, num_rows: int) -> None:
        request = live.request
        self._served[request.caller] = self._served_to(live) + num_rows / request.weight

    def _served_to(self, live: LiveRequest) -> float:
        return self._served.get(live.request.caller, 0.0)

    def next_prompt(
        self, partly: Iterable[LiveRequest], newcomer: LiveRequest | None
    ) -> LiveRequest | None:
        """Returns which prompt is computed next: a partly computed one, or the newcomer's. Of one
        caller the first of those that are partly computed."""

        def order(live: LiveRequest) -> tuple[int, float]:
            return live.request.priority, self._served_to(live)

        candidates = partly if newcomer is None else (*partly, newcomer)
        return min(candidates, key=order, default=None)

    def newcomer(
        self, heads: Iterable[LiveRequest], *, running: Iterable[LiveRequest]
    ) -> LiveRequest | None:
        """Returns which of these waiting requests gets the next slot: of the caller with the
        fewest by weight."""
        heads = list(heads)
        if len(heads) < 2:
            return next(iter(heads), None)
        counts = Counter(live.request.caller for live in running)

        def order(live: LiveRequest) -> tuple[int, float, float, int]:
            request = live.request
            slots = counts[request.caller] / request.weight
            return request.priority, slots, self._served_to(live), live.ticket

        return min(heads, key=order)

    def victim(
        self,
        live: LiveRequest,
        *,
        running: Collection[LiveRequest],
        waiting: Iterable[LiveRequest],
    ) -> LiveRequest | None:
        """Returns the running request that makes room for this one; None: it has to wait. `waiting`
        has one of each class.

        First one of a lower priority; else one of a caller above its share of the slots, if this
        one's caller stays within its own.
        """
        idle = [other for other in running if not other.in_flight and not other.is_aborted]
        priority = live.request.priority
        lower = [other for other in idle if other.request.priority > priority]
        if lower:
            return last_to_stay(lower, running=running)
        peers = [other for other in running if other.request.priority == priority]
        weights = {
            other.request.caller: other.request.weight
            for other in (*peers, *waiting, live)
            if other.request.priority == priority
        }
        if len(weights) == 1:
            return None
        counts = Counter(other.request.caller for other in peers)
        slot = len(peers) / sum(weights.values())
        shares = {caller: max(1.0, slot * weight) for caller, weight in weights.items()}
        caller = live.request.caller
        if counts[caller] + 1 > shares[caller]:
            return None
        above = [
            other
            for other in idle
            if other.request.priority == priority
            and counts[other.request.caller] > shares[other.request.caller]
        ]
        return last_to_stay(above, running=running) if above else None


def last_to_stay(lives: Iterable[LiveRequest], *, running: Iterable[LiveRequest]) -> LiveRequest:
    """Returns which of these requests is preempted first: of the lowest priority, then of the
    caller with the most slots by weight, then the youngest."""
    counts = Counter(live.request.caller for live in running)

    def order(live: LiveRequest) -> tuple[int, float, int]:
        request = live.request
        return request.priority, counts[request.caller] / request.weight, live.ticket

    return max(lives, key=order)


def _class_of(live: LiveRequest) -> Class:
    return live.request.priority, live.request.caller
