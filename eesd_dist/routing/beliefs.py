"""Beliefs about acceptance, per workload class and per live request.

Decides the belief that a new request starts with, how each outcome changes it, and what a finished
request adds to the pool of its class. Uses no clock, and is plain and picklable. The router actor
holds a book, and each pipeline holds a small one for when the router does not answer.

A class's pool (`routing.pools`) is discounted with every request that is added. It gives a new
request a prior of at most `prior_weight` judged tokens: enough for a good start, and outweighed by
a few rounds of the request itself. What one caller teaches counts little for the others.

Pinned pools do not change: the prior of a request no longer depends on earlier requests. Its
own rounds still update its own belief.
"""

import json
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from msgspec import structs

from eesd_dist.control.belief import Belief
from eesd_dist.errors import CheckpointError, ConfigError
from eesd_dist.routing.pools import NO_CALLER, ByCaller, Pools
from eesd_dist.types import Outcome, RequestId, Value

_VERSION = 1
_UNKNOWN = "?"
"""Caller of requests that were never admitted here; no API key has this name."""
_ENTRIES_AT_A_TIME = 64
_PAUSE_S = 0.001
"""Pause between pieces of a snapshot: encoding holds the GIL, and other threads must run."""


class DraftPlan(Value, frozen=True, kw_only=True):
    """The router's plan for the next rounds of one request."""

    request_id: RequestId
    belief: Belief


@dataclass(frozen=True, slots=True, kw_only=True)
class Priors:
    """The pools of all classes, from which priors of new requests are made."""

    pools: Mapping[str, Belief]
    """Pools of an operator's file, and of requests without a caller."""
    is_pinned: bool
    by_caller: ByCaller = field(default_factory=dict)
    """Pools of the callers with a name."""

    @property
    def all_pools(self) -> ByCaller:
        return {NO_CALLER: self.pools, **self.by_caller}


class _Live(Value, frozen=True, kw_only=True):
    """The beliefs about one live request."""

    workload: str
    caller: str
    belief: Belief
    """Prior and own rounds together: what the controller uses."""
    own: Belief
    """Own rounds alone: what is added to the pool, so that no prior is counted twice."""
    page: int
    """The page of the book when it was last admitted or observed."""


class BeliefBook:
    """Pools of all classes, and beliefs of live requests.

    Bounded: when there are too many live requests, the one without an outcome for the longest time
    is folded into its pool. The cost of an outcome does not depend on the number of requests.
    """

    def __init__(
        self,
        *,
        discount: float = 0.98,
        pool_discount: float = 0.95,
        prior_weight: float = 16.0,
        foreign_weight: float = 8.0,
        max_live: int = 65_536,
        max_workloads: int = 256,
        max_pools: int = 1024,
    ) -> None:
        """`max_workloads`: classes that are kept of one caller."""
        self._discount = discount
        self._max_live = max_live
        self._new_pools = partial(
            Pools,
            discount=pool_discount,
            prior_weight=prior_weight,
            foreign_weight=foreign_weight,
            max_workloads=max_workloads,
            max_pools=max_pools,
        )
        self._live: OrderedDict[RequestId, _Live] = OrderedDict()
        self._num_live_of: Counter[tuple[str, str]] = Counter()
        """Number of live requests by caller and class."""
        self._pools = self._new_pools()
        self._page = 0
        self._is_pinned = False
        self._version = 0

    def admit(
        self, request_id: RequestId, workload: str = "default", *, caller: str = NO_CALLER
    ) -> DraftPlan:
        """Adds a request and returns its first plan. Admitted again (resumed in another pipeline)
        it keeps its belief."""
        live = self._live.get(request_id)
        if live is not None:
            live = structs.replace(live, page=self._page)
        else:
            live = _Live(
                workload=workload,
                caller=caller,
                belief=self.prior(workload, caller=caller),
                own=Belief(),
                page=self._page,
            )
            self._num_live_of[caller, workload] += 1
        self._keep(request_id, live)
        return DraftPlan(request_id=request_id, belief=live.belief)

    def observe(self, outcomes: Sequence[Outcome]) -> dict[RequestId, DraftPlan]:
        """Updates beliefs and returns the next plan of each request. Admits unknown requests, as
        they occur after a restart of the router."""
        beliefs: dict[RequestId, Belief] = {}
        for outcome in outcomes:
            request_id = outcome.request_id
            if request_id not in self._live:
                self.admit(request_id, caller=_UNKNOWN)
            old = self._live[request_id]
            live = _Live(
                workload=old.workload,
                caller=old.caller,
                belief=old.belief.after(outcome, discount=self._discount),
                own=old.own.after(outcome, discount=self._discount),
                page=self._page,
            )
            self._live[request_id] = live
            self._live.move_to_end(request_id)
            beliefs[request_id] = live.belief
        return {
            request_id: DraftPlan(request_id=request_id, belief=belief)
            for request_id, belief in beliefs.items()
        }

    def finish(self, request_id: RequestId) -> None:
        """Adds the request's own rounds to the pool of its class; ignores unknown requests."""
        live = self._live.pop(request_id, None)
        if live is not None:
            self._leave(live)

    def turn_page(self) -> int:
        """Begins a page. Requests without an outcome since the previous page began are taken for
        ended and finished. Returns how many there were."""
        self._page += 1
        count = 0
        while self._live:
            request_id, oldest = next(iter(self._live.items()))
            if oldest.page >= self._page - 1:
                break
            self.finish(request_id)
            count += 1
        return count

    def prior(self, workload: str, *, caller: str = NO_CALLER) -> Belief:
        """Returns the belief that a new request of this class and caller starts with."""
        return self._pools.prior(caller, workload)

    def pools(self) -> Mapping[str, Belief]:
        """Returns the pooled belief of each class, over all callers."""
        return self._pools.by_workload()

    def priors(self) -> Priors:
        by_caller = self._pools.by_caller()
        return Priors(
            pools=by_caller.pop(NO_CALLER, {}), is_pinned=self._is_pinned, by_caller=by_caller
        )

    def names(self) -> Iterator[tuple[str, str]]:
        """Yields the callers and classes of pools and live requests."""
        yield from self._pools.names()
        yield from self._num_live_of

    def adopt(self, priors: Priors) -> None:
        """Replaces the pools; live requests keep their beliefs.

        May be called while another thread uses the book: at most the update of one request is lost.
        """
        self._is_pinned = priors.is_pinned
        self._pools.replace(priors.all_pools)
        self._version += 1

    @property
    def version(self) -> int:
        """Changes whenever the pools change."""
        return self._version

    @property
    def is_pinned(self) -> bool:
        return self._is_pinned

    def pin(self) -> None:
        """Stops updates of the pools."""
        self._is_pinned = True
        self._version += 1

    def unpin(self) -> None:
        """Resumes updates of the pools, from requests that end from now on."""
        self._is_pinned = False
        self._version += 1

    @property
    def num_live(self) -> int:
        return len(self._live)

    def live_by_workload(self) -> Mapping[str, int]:
        """Returns the number of live requests of each class."""
        counts: Counter[str] = Counter()
        for (_, workload), count in self._num_live_of.items():
            counts[workload] += count
        return counts

    def copy(self) -> "BeliefBook":
        """Returns a copy, to be read or saved while this book changes."""
        twin = BeliefBook(discount=self._discount, max_live=self._max_live)
        twin._new_pools = self._new_pools
        twin._live = self._live.copy()
        twin._num_live_of = self._num_live_of.copy()
        twin._pools = self._new_pools()
        twin._pools.replace(self._pools.by_caller())
        twin._page = self._page
        twin._is_pinned = self._is_pinned
        twin._version = self._version
        return twin

    def snapshot(self) -> dict[str, object]:
        """Returns the whole state as plain JSON."""
        return {
            **priors_to_json(self.priors()),
            "live": [_live_to_json(*entry) for entry in self._live.items()],
        }

    def restore(self, snapshot: Mapping[str, object]) -> None:
        """Replaces the whole state by a snapshot. Raises ConfigError for one that is invalid."""
        if snapshot.get("version") != _VERSION:
            raise ConfigError(
                f"belief snapshot: found version {snapshot.get('version')!r}, expected "
                f"{_VERSION}: delete the file to start with no beliefs"
            )
        priors = Priors(
            pools=_read_pools(snapshot.get("pools")),
            is_pinned=snapshot.get("pinned") is True,
            by_caller={
                caller: _read_pools(pools)
                for caller, pools in _mapping(snapshot.get("by_caller")).items()
            },
        )
        live = _read_live(snapshot.get("live", []), page=self._page)
        self.adopt(priors)
        self._live = live
        self._num_live_of = Counter((request.caller, request.workload) for request in live.values())

    def save(self, file: Path) -> None:
        """Writes a snapshot atomically: readers, also after a crash, see the old file or the new.

        Call it in a thread, on a copy: it pauses regularly to let other threads run.
        """
        _write_whole(file, self._chunks())

    def load(self, file: Path) -> None:
        self.restore(read_snapshot(file))

    def _chunks(self) -> Iterator[str]:
        """Yields the snapshot as JSON text in small pieces."""
        head = json.dumps(priors_to_json(self.priors()))
        yield head.removesuffix("}") + ', "live": ['
        entries = iter(self._live.items())
        before = ""
        while some := list(islice(entries, _ENTRIES_AT_A_TIME)):
            yield before + json.dumps([_live_to_json(*entry) for entry in some])[1:-1]
            before = ", "
            time.sleep(_PAUSE_S)
        yield "]}"

    def _keep(self, request_id: RequestId, live: _Live) -> None:
        self._live[request_id] = live
        self._live.move_to_end(request_id)
        while len(self._live) > self._max_live:
            _, silent = self._live.popitem(last=False)
            self._leave(silent)

    def _leave(self, live: _Live) -> None:
        name = (live.caller, live.workload)
        self._num_live_of[name] -= 1
        if not self._num_live_of[name]:
            del self._num_live_of[name]
        if live.own.num_rounds > 0 and not self._is_pinned:
            self._pools.add(live.caller, live.workload, live.own)
            self._version += 1


def priors_to_json(priors: Priors) -> dict[str, object]:
    """Returns a snapshot of the pools alone, which operators save, pin and load."""
    return {
        "version": _VERSION,
        "pinned": priors.is_pinned,
        "pools": _pools_to_json(priors.pools),
        "by_caller": {name: _pools_to_json(pools) for name, pools in priors.by_caller.items()},
    }


def _pools_to_json(pools: Mapping[str, Belief]) -> dict[str, object]:
    return {name: pool.to_json() for name, pool in pools.items()}


def pools_from_json(snapshot: Mapping[str, object]) -> Mapping[str, Belief]:
    """Returns the pools of a snapshot over all callers; it may also contain live requests."""
    book = BeliefBook()
    book.restore(snapshot)
    return book.pools()


def write_snapshot(file: Path, snapshot: Mapping[str, object]) -> None:
    """Writes the file atomically."""
    _write_whole(file, [json.dumps(snapshot)])


def read_snapshot(file: Path) -> Mapping[str, object]:
    """Reads a snapshot. Raises CheckpointError for a file that is not one."""
    try:
        snapshot = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            file=file,
            found=str(error),
            expected="a belief snapshot in JSON",
            advice="name a file that `eesd controllers save` has written",
        ) from error
    if not isinstance(snapshot, dict):
        raise CheckpointError(
            file=file, found=type(snapshot).__name__, expected="a belief snapshot"
        )
    return snapshot


def _write_whole(file: Path, chunks: Iterable[str]) -> None:
    draft = file.with_name(f"{file.name}.{os.getpid()}.new")
    with draft.open("w") as stream:
        for chunk in chunks:
            stream.write(chunk)
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(file)


def _live_to_json(request_id: RequestId, live: _Live) -> dict[str, object]:
    return {
        "request_id": request_id,
        "workload": live.workload,
        "caller": live.caller,
        "belief": live.belief.to_json(),
        "own": live.own.to_json(),
    }


def _read_pools(data: object) -> dict[str, Belief]:
    return {name: Belief.from_json(_mapping(x)) for name, x in _mapping(data).items()}


def _read_live(data: object, *, page: int) -> OrderedDict[RequestId, _Live]:
    if not isinstance(data, list):
        raise ConfigError(f"belief snapshot: found {type(data).__name__}, expected a list")
    entries = [_mapping(entry) for entry in data]
    return OrderedDict(
        (RequestId(str(entry.get("request_id"))), _one(entry, page=page)) for entry in entries
    )


def _one(entry: Mapping[str, object], *, page: int) -> _Live:
    return _Live(
        workload=str(entry.get("workload")),
        caller=str(entry.get("caller", NO_CALLER)),
        belief=Belief.from_json(_mapping(entry.get("belief"))),
        own=Belief.from_json(_mapping(entry.get("own"))),
        page=page,
    )


def _mapping(data: object) -> Mapping[str, object]:
    if not isinstance(data, dict):
        raise ConfigError(f"belief snapshot: found {type(data).__name__}, expected an object")
    return data
