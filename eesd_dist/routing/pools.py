"""Pooled beliefs about acceptance, by caller and workload class.

A new request starts from the pool of its class: of its own caller's in full, and of what every
other caller has taught about the class with at most `foreign_weight` judged tokens each. So one
caller cannot decide what the requests of another one start from, whatever classes it names and
whatever its requests do. The number of pools is bounded for each caller, and for all together: the
caller with the most pools loses its oldest one.

The caller without a name holds the pools that an operator has loaded, and all pools of an engine
without callers.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import reduce

from msgspec import structs

from eesd_dist.control.belief import Belief

NO_CALLER = ""
ByCaller = Mapping[str, Mapping[str, Belief]]
"""Pools of callers, by class."""


class Pools:
    """The pools of all callers. Uses no clock."""

    def __init__(
        self,
        *,
        discount: float,
        prior_weight: float,
        foreign_weight: float,
        max_workloads: int,
        max_pools: int,
    ) -> None:
        """A prior weighs at most `prior_weight` judged tokens. A caller has at most
        `max_workloads` pools, and all callers together `max_pools`."""
        self._discount = discount
        self._prior_weight = prior_weight
        self._foreign_weight = foreign_weight
        self._max_workloads = max_workloads
        self._max_pools = max_pools
        self._pools: dict[str, OrderedDict[str, Belief]] = {}
        """Pools of each caller, the one that has not changed for the longest time first."""
        self._num_pools = 0
        self._of_all: Mapping[str, Belief] | None = None
        """All classes of each caller merged; None until it is needed again."""

    def add(self, caller: str, workload: str, own: Belief) -> None:
        """Adds a request's own rounds to the pool of its class."""
        pools = self._pools.setdefault(caller, OrderedDict())
        self._num_pools += workload not in pools
        pools[workload] = pools.get(workload, Belief()).scaled(self._discount).merged(own)
        pools.move_to_end(workload)
        self._of_all = None
        if len(pools) > self._max_workloads:
            self._drop_oldest(caller)
        while self._num_pools > self._max_pools:
            self._drop_oldest(max(self._pools, key=lambda name: len(self._pools[name])))

    def prior(self, caller: str, workload: str) -> Belief:
        """Returns the belief that a new request starts with: of its class, or of all classes where
        no caller has a pool of it."""
        by_caller = {
            name: pools[workload] for name, pools in self._pools.items() if workload in pools
        }
        sources = by_caller or self._together()
        merged = sources.get(caller, Belief())
        for name, pool in sources.items():
            if name != caller:
                merged = merged.merged(pool.bounded(self._weight_of(name)))
        return structs.replace(merged.bounded(self._prior_weight), num_rounds=0)

    def by_workload(self) -> dict[str, Belief]:
        """Returns the pool of each class over all callers."""
        merged: dict[str, Belief] = {}
        for pools in self._pools.values():
            for workload, pool in pools.items():
                merged[workload] = merged.get(workload, Belief()).merged(pool)
        return merged

    def by_caller(self) -> dict[str, dict[str, Belief]]:
        """Returns a copy of all pools."""
        return {caller: dict(pools) for caller, pools in self._pools.items()}

    def names(self) -> Iterator[tuple[str, str]]:
        """Yields caller and class of each pool."""
        for caller, pools in self._pools.items():
            for workload in pools:
                yield caller, workload

    def replace(self, pools: ByCaller) -> None:
        """Replaces all pools. May be called while another thread uses them: at most the update of
        one request is lost."""
        self._pools = {
            caller: OrderedDict(by_workload) for caller, by_workload in pools.items() if by_workload
        }
        self._num_pools = sum(map(len, self._pools.values()))
        self._of_all = None

    def _weight_of(self, other: str) -> float:
        return self._prior_weight if other == NO_CALLER else self._foreign_weight

    def _together(self) -> Mapping[str, Belief]:
        if self._of_all is None:
            self._of_all = {
                caller: reduce(Belief.merged, pools.values(), Belief())
                for caller, pools in self._pools.items()
            }
        return self._of_all

    def _drop_oldest(self, caller: str) -> None:
        pools = self._pools[caller]
        pools.popitem(last=False)
        self._num_pools -= 1
        if not pools:
            del self._pools[caller]
