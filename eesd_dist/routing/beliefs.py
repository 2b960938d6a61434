"""What the service believes about acceptance: per workload class, and per live request.

Decides the belief a new request starts with, what each outcome changes, and what a finished request
leaves behind for the next. Refuses to know where requests run, how lengths are chosen, and any
clock. Plain and picklable; a router actor stands around it, and every pipeline keeps a small one
of its own for when the router is silent.

A class's pool forgets a little with every request that joins it, and lends a newcomer its opinion
at no more than `prior_weight` judged tokens: enough to start warm, too little to argue with a few
rounds of the request's own. A class never met borrows from all the others together.

Pinned, pools stay as they are: what a request is warmed with no longer depends on who came before
it. Its own rounds still teach it, and nobody else.
"""

import json
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from pathlib import Path

from eesd_dist.control.belief import Belief
from eesd_dist.errors import CheckpointError, ConfigError
from eesd_dist.types import Outcome, RequestId

_VERSION = 1
_ENTRIES_AT_A_TIME = 64
_PAUSE_S = 0.001
"""Encoding holds the interpreter's lock: after a millisecond of it, others have a turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """What the router tells a draft stage about one request's next rounds."""

    request_id: RequestId
    belief: Belief


@dataclass(frozen=True, slots=True, kw_only=True)
class Priors:
    """Every class's pool, to be handed to whoever warms requests with them."""

    pools: Mapping[str, Belief]
    is_pinned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Live:
    """One request under way."""

    workload: str
    belief: Belief
    """Prior and own rounds together: what the controller uses."""
    own: Belief
    """Own rounds alone: what the pool gets, so that no prior is ever counted twice."""
    page: int
    """On which page of the book it was last heard of."""


class BeliefBook:
    """Bounded: when there are too many, the live request longest unheard of goes, and leaves what
    it taught in its pool. An outcome costs the same however many requests live."""

    def __init__(
        self,
        *,
        discount: float = 0.98,
        pool_discount: float = 0.95,
        prior_weight: float = 16.0,
        max_live: int = 65_536,
        max_workloads: int = 256,
    ) -> None:
        self._discount = discount
        self._pool_discount = pool_discount
        self._prior_weight = prior_weight
        self._max_live = max_live
        self._max_workloads = max_workloads
        self._live: OrderedDict[RequestId, _Live] = OrderedDict()
        self._num_live_of: Counter[str] = Counter()
        self._pools: OrderedDict[str, Belief] = OrderedDict()
        self._page = 0
        self._is_pinned = False
        self._version = 0
        self._of_all: tuple[int, Belief] | None = None
        """All pools together, and the version they had; None before anybody asked."""

    def admit(self, request_id: RequestId, workload: str = "default") -> DraftPlan:
        """The first plan of a request. Admitted again (resumed elsewhere) it keeps its belief."""
        live = self._live.get(request_id)
        if live is not None:
            live = replace(live, page=self._page)
        else:
            prior = self.prior(workload)
            live = _Live(workload=workload, belief=prior, own=Belief(), page=self._page)
            self._num_live_of[workload] += 1
        self._keep(request_id, live)
        return DraftPlan(request_id=request_id, belief=live.belief)

    def observe(self, outcomes: Sequence[Outcome]) -> dict[RequestId, DraftPlan]:
        """The next plan of every request heard of. One never met (the router was restarted) is
        admitted on the way."""
        heard: dict[RequestId, Belief] = {}
        for outcome in outcomes:
            request_id = outcome.request_id
            if request_id not in self._live:
                self.admit(request_id)
            old = self._live[request_id]
            live = _Live(
                workload=old.workload,
                belief=old.belief.after(outcome, discount=self._discount),
                own=old.own.after(outcome, discount=self._discount),
                page=self._page,
            )
            self._live[request_id] = live
            self._live.move_to_end(request_id)
            heard[request_id] = live.belief
        return {
            request_id: DraftPlan(request_id=request_id, belief=belief)
            for request_id, belief in heard.items()
        }

    def finish(self, request_id: RequestId) -> None:
        """Folds what the request taught into its class; unknown requests are nothing to us."""
        live = self._live.pop(request_id, None)
        if live is not None:
            self._leave(live)

    def turn_page(self) -> int:
        """Requests not heard of since the page before was begun have ended where nobody could say
        so; what they taught is folded. Returns how many there were."""
        self._page += 1
        count = 0
        while self._live:
            request_id, oldest = next(iter(self._live.items()))
            if oldest.page >= self._page - 1:
                break
            self.finish(request_id)
            count += 1
        return count

    def prior(self, workload: str) -> Belief:
        """What a new request of this class starts with."""
        pool = self._pools.get(workload)
        if pool is None:
            pool = self._all_together()
        return replace(pool.bounded(self._prior_weight), num_rounds=0)

    def pools(self) -> Mapping[str, Belief]:
        """Every class's pooled belief, to be looked at."""
        return dict(self._pools)

    def priors(self) -> Priors:
        return Priors(pools=self.pools(), is_pinned=self._is_pinned)

    def adopt(self, priors: Priors) -> None:
        """Takes over somebody's pools in place of its own; live requests keep their beliefs.

        May be called while another thread uses the book: what that one has in hand is one request's
        worth of learning, and it is that much that may be lost.
        """
        self._is_pinned = priors.is_pinned
        self._pools = OrderedDict(priors.pools)
        self._version += 1

    @property
    def version(self) -> int:
        """Another number, other pools."""
        return self._version

    @property
    def is_pinned(self) -> bool:
        return self._is_pinned

    def pin(self) -> None:
        """From now on the pools stay as they are."""
        self._is_pinned = True
        self._version += 1

    def unpin(self) -> None:
        """They learn again, from the requests that end from now on."""
        self._is_pinned = False
        self._version += 1

    @property
    def num_live(self) -> int:
        return len(self._live)

    def live_by_workload(self) -> Mapping[str, int]:
        """How many requests of each class are under way."""
        return dict(self._num_live_of)

    def copy(self) -> "BeliefBook":
        """Another book that knows the same: to be looked at, or saved, while this one goes on."""
        twin = BeliefBook(
            discount=self._discount,
            pool_discount=self._pool_discount,
            prior_weight=self._prior_weight,
            max_live=self._max_live,
            max_workloads=self._max_workloads,
        )
        twin._live = self._live.copy()
        twin._num_live_of = self._num_live_of.copy()
        twin._pools = self._pools.copy()
        twin._page = self._page
        twin._is_pinned = self._is_pinned
        twin._version = self._version
        return twin

    def snapshot(self) -> dict[str, object]:
        """Everything learnt, as plain JSON."""
        return {
            "version": _VERSION,
            "pinned": self._is_pinned,
            "pools": {name: pool.to_json() for name, pool in self._pools.items()},
            "live": [_live_to_json(*entry) for entry in self._live.items()],
        }

    def restore(self, snapshot: Mapping[str, object]) -> None:
        """Takes over a snapshot whole; what this book knew before is gone."""
        if snapshot.get("version") != _VERSION:
            raise ConfigError(
                f"belief snapshot: found version {snapshot.get('version')!r}, expected "
                f"{_VERSION}: delete the file to start with no beliefs"
            )
        pools = _read_pools(snapshot.get("pools"))
        live = _read_live(snapshot.get("live", []), page=self._page)
        self._pools, self._live = pools, live
        self._num_live_of = Counter(one.workload for one in live.values())
        self._is_pinned = snapshot.get("pinned") is True
        self._version += 1

    def save(self, file: Path) -> None:
        """Whole or not at all: a reader and a crash see the old file or the new one.

        Meant for a thread, on a copy: it lets the others run again and again on its way.
        """
        _write_whole(file, self._pieces())

    def load(self, file: Path) -> None:
        self.restore(read_snapshot(file))

    def _pieces(self) -> Iterator[str]:
        """The snapshot as JSON text, a little at a time."""
        head = json.dumps(priors_to_json(self.priors()))
        yield head.removesuffix("}") + ', "live": ['
        entries = iter(self._live.items())
        before = ""
        while some := list(islice(entries, _ENTRIES_AT_A_TIME)):
            yield before + json.dumps([_live_to_json(*entry) for entry in some])[1:-1]
            before = ", "
            time.sleep(_PAUSE_S)
        yield "]}"

    def _all_together(self) -> Belief:
        version = self._version
        if self._of_all is None or self._of_all[0] != version:
            self._of_all = (version, reduce(Belief.merged, self._pools.values(), Belief()))
        return self._of_all[1]

    def _keep(self, request_id: RequestId, live: _Live) -> None:
        self._live[request_id] = live
        self._live.move_to_end(request_id)
        while len(self._live) > self._max_live:
            _, silent = self._live.popitem(last=False)
            self._leave(silent)

    def _leave(self, live: _Live) -> None:
        self._num_live_of[live.workload] -= 1
        if not self._num_live_of[live.workload]:
            del self._num_live_of[live.workload]
        if live.own.num_rounds > 0 and not self._is_pinned:
            self._fold(live)

    def _fold(self, live: _Live) -> None:
        pools = self._pools
        pool = pools.get(live.workload, Belief()).scaled(self._pool_discount)
        pools[live.workload] = pool.merged(live.own)
        pools.move_to_end(live.workload)
        while len(pools) > self._max_workloads:
            pools.popitem(last=False)
        self._version += 1


def priors_to_json(priors: Priors) -> dict[str, object]:
    """A snapshot of pools alone: what an operator saves, pins and loads."""
    return {
        "version": _VERSION,
        "pinned": priors.is_pinned,
        "pools": {name: pool.to_json() for name, pool in priors.pools.items()},
    }


def pools_from_json(snapshot: Mapping[str, object]) -> Mapping[str, Belief]:
    """The pools of a snapshot, with or without live requests in it."""
    book = BeliefBook()
    book.restore(snapshot)
    return book.pools()


def write_snapshot(file: Path, snapshot: Mapping[str, object]) -> None:
    """Whole or not at all."""
    _write_whole(file, [json.dumps(snapshot)])


def read_snapshot(file: Path) -> Mapping[str, object]:
    """Raises CheckpointError for a file that is none."""
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


def _write_whole(file: Path, pieces: Iterable[str]) -> None:
    draft = file.with_name(f"{file.name}.{os.getpid()}.new")
    with draft.open("w") as stream:
        for piece in pieces:
            stream.write(piece)
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(file)


def _live_to_json(request_id: RequestId, live: _Live) -> dict[str, object]:
    return {
        "request_id": request_id,
        "workload": live.workload,
        "belief": live.belief.to_json(),
        "own": live.own.to_json(),
    }


def _read_pools(data: object) -> OrderedDict[str, Belief]:
    return OrderedDict((name, Belief.from_json(_mapping(x))) for name, x in _mapping(data).items())


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
        belief=Belief.from_json(_mapping(entry.get("belief"))),
        own=Belief.from_json(_mapping(entry.get("own"))),
        page=page,
    )


def _mapping(data: object) -> Mapping[str, object]:
    if not isinstance(data, dict):
        raise ConfigError(f"belief snapshot: found {type(data).__name__}, expected an object")
    return data
