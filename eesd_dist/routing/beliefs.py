"""What the service believes about acceptance: per workload class, and per live request.

Decides the belief a new request starts with, what each outcome changes, and what a finished request
leaves behind for the next. Refuses to know where requests run, how lengths are chosen, and any
clock. Plain and picklable; a router actor stands around it.

A class's pool forgets a little with every request that joins it, and lends a newcomer its opinion
at no more than `prior_weight` judged tokens: enough to start warm, too little to argue with a few
rounds of the request's own. A class never met borrows from all the others together.
"""

import json
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

from eesd_dist.control.belief import Belief
from eesd_dist.errors import CheckpointError, ConfigError
from eesd_dist.types import Outcome, RequestId

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """What the router tells a draft stage about one request's next rounds."""

    request_id: RequestId
    ceiling: int
    """Most tokens one draft may have; 0 is plain decoding."""
    belief: Belief


@dataclass(frozen=True, slots=True, kw_only=True)
class _Live:
    """One request under way."""

    workload: str
    ceiling: int
    belief: Belief
    """Prior and own rounds together: what the controller uses."""
    own: Belief
    """Own rounds alone: what the pool gets, so that no prior is ever counted twice."""


class BeliefBook:
    """Bounded: when there are too many, the live request longest unheard of goes, and leaves what
    it taught in its pool."""

    def __init__(
        self,
        *,
        ceiling: int,
        discount: float = 0.98,
        pool_discount: float = 0.95,
        prior_weight: float = 16.0,
        max_live: int = 4096,
        max_workloads: int = 256,
    ) -> None:
        self._ceiling = ceiling
        self._discount = discount
        self._pool_discount = pool_discount
        self._prior_weight = prior_weight
        self._max_live = max_live
        self._max_workloads = max_workloads
        self._live: OrderedDict[RequestId, _Live] = OrderedDict()
        self._pools: OrderedDict[str, Belief] = OrderedDict()

    def admit(
        self, request_id: RequestId, workload: str = "default", *, ceiling: int | None = None
    ) -> DraftPlan:
        """The first plan of a request. Admitted again (resumed elsewhere) it keeps its belief."""
        live = self._live.get(request_id)
        if live is None:
            limit = self._ceiling if ceiling is None else min(ceiling, self._ceiling)
            prior = self.prior(workload)
            live = _Live(workload=workload, ceiling=limit, belief=prior, own=Belief())
        self._keep(request_id, live)
        return _plan(request_id, live)

    def observe(self, outcomes: Sequence[Outcome]) -> dict[RequestId, DraftPlan]:
        """The next plan of every request heard of. One never met (the router was restarted) is
        admitted on the way."""
        plans: dict[RequestId, DraftPlan] = {}
        for outcome in outcomes:
            self.admit(outcome.request_id)
            old = self._live[outcome.request_id]
            live = replace(
                old,
                belief=old.belief.after(outcome, discount=self._discount),
                own=old.own.after(outcome, discount=self._discount),
            )
            self._keep(outcome.request_id, live)
            plans[outcome.request_id] = _plan(outcome.request_id, live)
        return plans

    def finish(self, request_id: RequestId) -> None:
        """Folds what the request taught into its class; unknown requests are nothing to us."""
        live = self._live.pop(request_id, None)
        if live is not None:
            self._fold(live)

    def prior(self, workload: str) -> Belief:
        """What a new request of this class starts with."""
        pool = self._pools.get(workload)
        if pool is None:
            pool = reduce(Belief.merged, self._pools.values(), Belief())
        return replace(pool.bounded(self._prior_weight), num_rounds=0)

    def pools(self) -> Mapping[str, Belief]:
        """Every class's pooled belief, to be looked at."""
        return dict(self._pools)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def snapshot(self) -> dict[str, object]:
        """Everything learnt, as plain JSON."""
        return {
            "version": _VERSION,
            "pools": {name: pool.to_json() for name, pool in self._pools.items()},
            "live": [
                {
                    "request_id": request_id,
                    "workload": live.workload,
                    "ceiling": live.ceiling,
                    "belief": live.belief.to_json(),
                    "own": live.own.to_json(),
                }
                for request_id, live in self._live.items()
            ],
        }

    def restore(self, snapshot: Mapping[str, object]) -> None:
        """Takes over a snapshot whole; what this book knew before is gone."""
        if snapshot.get("version") != _VERSION:
            raise ConfigError(
                f"belief snapshot: found version {snapshot.get('version')!r}, expected "
                f"{_VERSION}: delete the file to start with no beliefs"
            )
        pools, live = _read_pools(snapshot.get("pools")), _read_live(snapshot.get("live"))
        self._pools, self._live = pools, live

    def save(self, file: Path) -> None:
        """Whole or not at all: a reader and a crash see the old file or the new one."""
        draft = file.with_name(f"{file.name}.{os.getpid()}.new")
        with draft.open("w") as stream:
            json.dump(self.snapshot(), stream)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(file)

    def load(self, file: Path) -> None:
        try:
            snapshot = json.loads(file.read_text())
        except json.JSONDecodeError as error:
            raise CheckpointError(
                file=file,
                found=str(error),
                expected="a belief snapshot in JSON",
                advice="delete it to start with no beliefs",
            ) from error
        if not isinstance(snapshot, dict):
            raise CheckpointError(
                file=file, found=type(snapshot).__name__, expected="a belief snapshot"
            )
        self.restore(snapshot)

    def _keep(self, request_id: RequestId, live: _Live) -> None:
        self._live[request_id] = live
        self._live.move_to_end(request_id)
        while len(self._live) > self._max_live:
            _, silent = self._live.popitem(last=False)
            self._fold(silent)

    def _fold(self, live: _Live) -> None:
        if live.own.num_rounds == 0:
            return
        pool = self._pools.get(live.workload, Belief()).scaled(self._pool_discount)
        self._pools[live.workload] = pool.merged(live.own)
        self._pools.move_to_end(live.workload)
        while len(self._pools) > self._max_workloads:
            self._pools.popitem(last=False)


def _plan(request_id: RequestId, live: _Live) -> DraftPlan:
    return DraftPlan(request_id=request_id, ceiling=live.ceiling, belief=live.belief)


def _read_pools(data: object) -> OrderedDict[str, Belief]:
    return OrderedDict((name, Belief.from_json(_mapping(x))) for name, x in _mapping(data).items())


def _read_live(data: object) -> OrderedDict[RequestId, _Live]:
    if not isinstance(data, list):
        raise ConfigError(f"belief snapshot: found {type(data).__name__}, expected a list")
    entries = [_mapping(entry) for entry in data]
    return OrderedDict((RequestId(str(entry.get("request_id"))), _one(entry)) for entry in entries)


def _one(entry: Mapping[str, object]) -> _Live:
    ceiling = entry.get("ceiling")
    if not isinstance(ceiling, int):
        raise ConfigError(f"belief snapshot: found ceiling {ceiling!r}, expected a whole number")
    return _Live(
        workload=str(entry.get("workload")),
        ceiling=ceiling,
        belief=Belief.from_json(_mapping(entry.get("belief"))),
        own=Belief.from_json(_mapping(entry.get("own"))),
    )


def _mapping(data: object) -> Mapping[str, object]:
    if not isinstance(data, dict):
        raise ConfigError(f"belief snapshot: found {type(data).__name__}, expected an object")
    return data
