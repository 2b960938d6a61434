"""Load balancing: chooses the pipeline for a request by cached prefix and load.

Based on the pipelines' reports, which are slightly old, and on the requests that this ingress has
sent since. Cache contents are estimated from which prompts went where: a wrong estimate costs only
time. The clock and the random numbers are passed in.

The work that a pipeline has to do before and during a request is measured in prompt tokens:

    cost = (prompt tokens not expected in its cache + R * live requests) / speed

with R = `request_tokens`, the cost of a live request to the others. The request goes to the lowest
cost: load and locality in one unit, as in Preble's exploration and exploitation (Srivatsa et al.,
arXiv 2407.00023, section 4). Requests with a long common prefix would still pile up on one
pipeline, so a cached prefix is ignored on a pipeline with over `max_imbalance` requests more than
the least loaded one: SGLang's cache-aware router (arXiv 2312.07104) has the same two regimes.
Without a cached prefix only two pipelines drawn at random are compared, so that ingresses with the
same old reports do not all choose the same one (Mitzenmacher, "The power of two choices", IEEE TPDS
2001).
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from typing import Any

from eesd_dist.routing.directory import Listed, PipelineId, PipelineReport

_AS_FAST = 0.8
"""Pipelines with at least this share of the fastest one's speed count as equal: speeds are measured
once, on machines with other load."""
_MAX_CHANGES = 1024
"""Maximum changes kept with their own time; the oldest are merged, so that a router that is silent
for an hour costs neither memory nor time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineChoice:
    """The pipeline chosen for a request."""

    pipeline: PipelineId
    leader: str
    address: Any
    num_cached_tokens: int
    """Estimated number of its prompt tokens in the pipeline's cache."""


def block_digests(
    tokens: Sequence[int], *, block_size: int, max_blocks: int, cache_salt: str = ""
) -> list[bytes]:
    """Returns digests of the full blocks a text begins with, each of all tokens up to its end and
    of the salt: requests with another one do not find the pages of this text."""
    digests: list[bytes] = []
    parent = cache_salt.encode("utf-8", "surrogatepass")
    for index in range(min(len(tokens) // block_size, max_blocks)):
        content = array("q", tokens[index * block_size : (index + 1) * block_size])
        parent = blake2b(parent + content.tobytes(), digest_size=8).digest()
        digests.append(parent)
    return digests


class PrefixMemory:
    """The prefixes sent to a pipeline lately; evicts the least recently used when full."""

    def __init__(self, *, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def remember(self, digests: Sequence[bytes]) -> None:
        # The last block is inserted first, so that eviction shortens a prefix from its end.
        for digest in reversed(digests):
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        while len(self._blocks) > self.max_blocks:
            self._blocks.popitem(last=False)

    def num_known(self, digests: Sequence[bytes]) -> int:
        """Returns how many blocks are known, from the first one on."""
        for count, digest in enumerate(digests):
            if digest not in self._blocks:
                return count
        return len(digests)


@dataclass(slots=True, kw_only=True)
class _Pipeline:
    """A pipeline as this ingress knows it."""

    report: PipelineReport
    received_s: float
    """Time of the report on this ingress's clock."""
    memory: PrefixMemory
    num_own: int = 0
    """Live requests of this ingress."""
    changes: deque[tuple[float, int]] = field(default_factory=deque)
    """Starts (+1) and ends (-1) of this ingress's requests that the report may not include."""
    num_unheard: int = 0
    """Sum of these changes."""
    suspected_s: float = float("-inf")
    """Time when it last failed."""

    @property
    def load(self) -> int:
        reported = self.report.num_running + self.report.num_waiting
        return max(self.num_own, reported + self.num_unheard)

    @property
    def is_ready(self) -> bool:
        return self.report.is_ready and self.received_s > self.suspected_s

    @property
    def is_usable(self) -> bool:
        return self.is_ready and not self.report.draining

    def change(self, by: int, *, time_s: float) -> None:
        self.num_own += by
        self.num_unheard += by
        self.changes.append((time_s, by))
        if len(self.changes) > _MAX_CHANGES:
            _, oldest = self.changes.popleft()
            next_s, next_oldest = self.changes.popleft()
            self.changes.appendleft((next_s, oldest + next_oldest))

    def hear(self, report: PipelineReport, *, received_s: float) -> None:
        self.report = report
        self.received_s = received_s
        while self.changes and self.changes[0][0] < received_s:
            self.num_unheard -= self.changes.popleft()[1]


class PipelineChooser:
    """An ingress's view of the pipelines of its service."""

    def __init__(
        self,
        *,
        block_size: int,
        max_blocks: int,
        clock: Callable[[], float],
        rng: Random,
        expiry_s: float = 5.0,
        request_tokens: float = 128.0,
        max_imbalance: float = 16.0,
    ) -> None:
        """Remembers as many blocks for each pipeline as it reports pages; `max_blocks` while it
        reports none. 0: prefixes are not cached."""
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._clock = clock
        self._rng = rng
        self._expiry_s = expiry_s
        self._request_tokens = request_tokens
        self._max_imbalance = max_imbalance
        self._pipelines: dict[PipelineId, _Pipeline] = {}
        self._slowest_start_s: float | None = None

    def refresh(self, listed: Iterable[Listed]) -> None:
        """Takes over the directory's list.

        A pipeline that is not listed any more is forgotten only when its last report has expired: a
        directory that was just restarted lists none.
        """
        time_s = self._clock()
        for entry in listed:
            received_s = time_s - entry.age_s
            pipeline = self._pipelines.get(entry.report.pipeline_id)
            if pipeline is None:
                self._pipelines[entry.report.pipeline_id] = _Pipeline(
                    report=entry.report,
                    received_s=received_s,
                    memory=PrefixMemory(max_blocks=self._blocks_of(entry.report)),
                )
            else:
                pipeline.hear(entry.report, received_s=received_s)
                pipeline.memory.max_blocks = self._blocks_of(entry.report)
        oldest_s = time_s - self._expiry_s
        self._pipelines = {i: p for i, p in self._pipelines.items() if p.received_s >= oldest_s}
        starts = [p.report.start_s for p in self._pipelines.values()]
        if starts_s := [start_s for start_s in starts if start_s is not None]:
            self._slowest_start_s = max(starts_s)

    def kv_tokens(self) -> int | None:
        """Returns the least that the KV pages of a pipeline hold; None while none has reported
        it."""
        reported = [p.report.kv_tokens for p in self._pipelines.values()]
        return min((tokens for tokens in reported if tokens is not None), default=None)

    def _blocks_of(self, report: PipelineReport) -> int:
        if report.kv_tokens is None or self._max_blocks == 0:
            return self._max_blocks
        return report.kv_tokens // self._block_size

    def choose(
        self,
        tokens: Sequence[int],
        *,
        cache_salt: str = "",
        excluded: Collection[str] = (),
        only: str | None = None,
    ) -> PipelineChoice | None:
        """Returns the pipeline for a request with these known tokens, and counts it as sent there.

        With `only` no other pipeline is considered. A draining pipeline, or an excluded one, is
        chosen only if there is no other. Returns None when no known pipeline is ready.
        """
        ready = {
            name: pipeline
            for name, pipeline in self._pipelines.items()
            if pipeline.is_ready and only in (None, name)
        }
        usable = {
            name: pipeline
            for name, pipeline in ready.items()
            if pipeline.is_usable and name not in excluded
        } or ready
        if not usable:
            return None
        digests = self._digests(tokens, cache_salt)
        speeds = _speeds(usable)
        cached = self._cached_tokens(usable, speeds, digests=digests, num_tokens=len(tokens))
        costs = {
            name: (len(tokens) - cached[name] + self._request_tokens * usable[name].load)
            / speeds[name]
            for name in self._compared(speeds, cached)
        }
        min_cost = min(costs.values())
        chosen = self._rng.choice([name for name, cost in costs.items() if cost == min_cost])
        pipeline = usable[chosen]
        pipeline.change(+1, time_s=self._clock())
        pipeline.memory.remember(digests)
        return PipelineChoice(
            pipeline=chosen,
            leader=pipeline.report.leader,
            address=pipeline.report.address,
            num_cached_tokens=cached[chosen],
        )

    def ended(
        self, pipeline: PipelineId, tokens: Sequence[int] = (), *, cache_salt: str = ""
    ) -> None:
        """Records that a request left a pipeline; `tokens`: its computed ones, prompt included."""
        record = self._pipelines.get(pipeline)
        if record is not None:
            record.change(-1, time_s=self._clock())
            record.memory.remember(self._digests(tokens, cache_salt))

    def lost(self, pipeline: PipelineId) -> None:
        """Records that a pipeline failed; it is not chosen before its next report."""
        record = self._pipelines.get(pipeline)
        if record is not None:
            record.suspected_s = self._clock()

    def addresses(self) -> dict[str, Any]:
        """Returns the address of each pipeline that is ready."""
        return {name: p.report.address for name, p in self._pipelines.items() if p.is_ready}

    def leaders(self) -> dict[str, str]:
        """Returns the leader of each known pipeline."""
        return {name: pipeline.report.leader for name, pipeline in self._pipelines.items()}

    def unavailable(self) -> dict[str, str]:
        """Returns why each known pipeline is not ready that is not."""
        reports = [p.report for p in self._pipelines.values() if not p.report.is_ready]
        return {report.pipeline_id: report.unavailable for report in reports}

    def crashed(self) -> frozenset[str]:
        """Returns leaders that have died of their own fault."""
        return frozenset(name for p in self._pipelines.values() for name in p.report.crashed)

    def slowest_start_s(self) -> float | None:
        """Returns the longest start of a known pipeline, or of the last ones while there is none;
        None if none was measured."""
        return self._slowest_start_s

    def describe(self) -> list[dict[str, object]]:
        """Returns plain JSON, for tests and operators."""
        return [
            {
                "pipeline": name,
                "load": pipeline.load,
                "is_usable": pipeline.is_usable,
                "num_blocks": len(pipeline.memory),
            }
            for name, pipeline in self._pipelines.items()
        ]

    def _digests(self, tokens: Sequence[int], cache_salt: str) -> list[bytes]:
        max_blocks = max((p.memory.max_blocks for p in self._pipelines.values()), default=0)
        return block_digests(
            tokens, block_size=self._block_size, max_blocks=max_blocks, cache_salt=cache_salt
        )

    def _cached_tokens(
        self,
        usable: dict[PipelineId, _Pipeline],
        speeds: dict[PipelineId, float],
        *,
        digests: Sequence[bytes],
        num_tokens: int,
    ) -> dict[PipelineId, int]:
        """Returns prompt tokens that each pipeline need not compute; 0 where its load is high."""
        # The last token is always computed: its row gets the verdict.
        findable = digests[: max(0, num_tokens - 1) // self._block_size]
        busy = {name: pipeline.load / speeds[name] for name, pipeline in usable.items()}
        limit = min(busy.values()) + self._max_imbalance
        return {
            name: pipeline.memory.num_known(findable) * self._block_size
            if busy[name] <= limit
            else 0
            for name, pipeline in usable.items()
        }

    def _compared(
        self, speeds: dict[PipelineId, float], cached: dict[PipelineId, int]
    ) -> set[PipelineId]:
        """Returns those with the longest cached prefix and two random ones, weighted by speed."""
        longest = max(cached.values())
        holders = {name for name, count in cached.items() if count == longest > 0}
        drawn: set[PipelineId] = set()
        left = dict(speeds)
        while left and len(drawn) < 2:
            name = self._rng.choices(list(left), weights=list(left.values()))[0]
            drawn.add(name)
            del left[name]
        return holders | drawn


def _speeds(pipelines: dict[PipelineId, _Pipeline]) -> dict[PipelineId, float]:
    """Returns speeds relative to the fastest; an unmeasured pipeline counts as 1."""
    weights = [p.report.weight for p in pipelines.values() if p.report.weight is not None]
    fastest = max(weights, default=1.0)
    speeds = {
        name: 1.0 if p.report.weight is None else p.report.weight / fastest
        for name, p in pipelines.items()
    }
    return {name: 1.0 if speed >= _AS_FAST else speed for name, speed in speeds.items()}
