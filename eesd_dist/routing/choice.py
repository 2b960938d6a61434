"""Which pipeline an ingress sends a request to: where its prefix lies, unless others are idler.

Decides from what pipelines have said of themselves, at second hand and a little late, and from
what this ingress has sent to them since. Refuses to know how they are reached and what is in their
caches: it remembers which prompts went where, which is a guess about caches and need be no more,
since a wrong one costs time alone. The clock and the dice come from outside.

What a pipeline has to compute before and beside a request is counted in prompt tokens:

    cost = (prompt tokens not expected in its cache + R * live requests) / speed

with R = `request_tokens`, what a live request still costs those beside it. The cheapest takes the
request: load and locality in one currency, as in Preble's exploration and exploitation (Srivatsa
et al., arXiv 2407.00023, section 4). Long prompts would still pile up where the longest of them
lies, so that beyond `max_imbalance` requests more than the idlest has, a cached prefix counts for
nothing: SGLang's cache-aware router (arXiv 2312.07104) has the same two regimes. Without a cached
prefix only two pipelines drawn at random are compared, so that ingresses which act on the same old
reports do not all choose the same one (Mitzenmacher, "The power of two choices", IEEE TPDS 2001).
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random

from eesd_dist.routing.directory import Listed, PipelineId, PipelineReport

_AS_FAST = 0.8
"""A pipeline this near to the fastest counts as equal: speeds were measured once, on machines that
did other things as well."""
_MAX_CHANGES = 1024
"""So many are told apart by when they were; of more, the oldest become one: a router that is silent
for an hour costs neither memory nor time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineChoice:
    """Where a request goes."""

    pipeline: PipelineId
    address: str
    num_cached_tokens: int
    """Of its prompt, as far as is known here."""


def block_digests(tokens: Sequence[int], *, block_size: int, max_blocks: int) -> list[bytes]:
    """Names for the full blocks a text begins with; each stands for all tokens up to its end."""
    digests: list[bytes] = []
    parent = b""
    for index in range(min(len(tokens) // block_size, max_blocks)):
        content = array("q", tokens[index * block_size : (index + 1) * block_size])
        parent = blake2b(parent + content.tobytes(), digest_size=8).digest()
        digests.append(parent)
    return digests


class PrefixMemory:
    """The prefixes a pipeline was sent lately; forgets the longest unused when it is full."""

    def __init__(self, *, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def remember(self, digests: Sequence[bytes]) -> None:
        # The last block goes first, so that a prefix is forgotten from its far end.
        for digest in reversed(digests):
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def num_known(self, digests: Sequence[bytes]) -> int:
        """How many blocks from the first on."""
        for count, digest in enumerate(digests):
            if digest not in self._blocks:
                return count
        return len(digests)


@dataclass(slots=True, kw_only=True)
class _Pipeline:
    """A pipeline as this ingress knows it."""

    report: PipelineReport
    heard_s: float
    """On this ingress's clock: when the pipeline said so."""
    memory: PrefixMemory
    num_own: int = 0
    """Live requests of this ingress."""
    changes: deque[tuple[float, int]] = field(default_factory=deque)
    """When this ingress's requests came and went, as far as the report may not know of it."""
    num_unheard: int = 0
    """All of these together."""
    suspected_s: float = float("-inf")
    """When it was last seen to fail."""

    @property
    def load(self) -> int:
        reported = self.report.num_running + self.report.num_waiting
        return max(self.num_own, reported + self.num_unheard)

    @property
    def is_usable(self) -> bool:
        return self.report.takes_requests and self.heard_s > self.suspected_s

    def change(self, by: int, *, now_s: float) -> None:
        self.num_own += by
        self.num_unheard += by
        self.changes.append((now_s, by))
        if len(self.changes) > _MAX_CHANGES:
            _, oldest = self.changes.popleft()
            next_s, next_oldest = self.changes.popleft()
            self.changes.appendleft((next_s, oldest + next_oldest))

    def hear(self, report: PipelineReport, *, heard_s: float) -> None:
        self.report = report
        self.heard_s = heard_s
        while self.changes and self.changes[0][0] < heard_s:
            self.num_unheard -= self.changes.popleft()[1]


class PipelineChooser:
    """One ingress's view of the pipelines of its service."""

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
        """`max_blocks` are remembered of each pipeline: as many as its cache has pages."""
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._clock = clock
        self._rng = rng
        self._expiry_s = expiry_s
        self._request_tokens = request_tokens
        self._max_imbalance = max_imbalance
        self._pipelines: dict[PipelineId, _Pipeline] = {}
        self._heard_s: dict[PipelineId, float] = {}
        """When each was heard of last; kept longer than what it said."""
        self._refreshed_s = float("-inf")
        self._answering_s = float("-inf")
        """Since when the directory has answered without a long silence."""

    def refresh(self, listed: Iterable[Listed]) -> None:
        """What the directory says now.

        One it does not name any more is forgotten once it has been silent for long: a directory
        that was just restarted names none.
        """
        now_s = self._clock()
        if now_s - self._refreshed_s > self._expiry_s:
            self._answering_s = now_s
        self._refreshed_s = now_s
        for each in listed:
            heard_s = now_s - each.age_s
            self._heard_s[each.report.pipeline_id] = heard_s
            known = self._pipelines.get(each.report.pipeline_id)
            if known is None:
                self._pipelines[each.report.pipeline_id] = _Pipeline(
                    report=each.report,
                    heard_s=heard_s,
                    memory=PrefixMemory(max_blocks=self._max_blocks),
                )
            else:
                known.hear(each.report, heard_s=heard_s)
        oldest_s = now_s - self._expiry_s
        self._pipelines = {i: p for i, p in self._pipelines.items() if p.heard_s >= oldest_s}
        oldest_s -= self._expiry_s
        self._heard_s = {i: heard_s for i, heard_s in self._heard_s.items() if heard_s >= oldest_s}

    def choose(
        self,
        tokens: Sequence[int],
        *,
        excluded: Collection[str] = (),
        only: str | None = None,
    ) -> PipelineChoice | None:
        """The pipeline for a request with these known tokens, which counts as sent there.

        With `only`, that one when it takes requests. None: nothing is known that does.
        """
        usable = {
            name: pipeline
            for name, pipeline in self._pipelines.items()
            if pipeline.is_usable and name not in excluded and only in (None, name)
        }
        if not usable:
            return None
        digests = self._digests(tokens)
        speeds = _speeds(usable)
        cached = self._cached_tokens(usable, speeds, digests=digests, num_tokens=len(tokens))
        costs = {
            name: (len(tokens) - cached[name] + self._request_tokens * usable[name].load)
            / speeds[name]
            for name in self._compared(speeds, cached)
        }
        least = min(costs.values())
        chosen = self._rng.choice([name for name, cost in costs.items() if cost == least])
        pipeline = usable[chosen]
        pipeline.change(+1, now_s=self._clock())
        pipeline.memory.remember(digests)
        return PipelineChoice(
            pipeline=chosen, address=pipeline.report.address, num_cached_tokens=cached[chosen]
        )

    def admitted(self, choice: PipelineChoice | None, *, by: PipelineId) -> None:
        """Whoever has the request now need not be who was chosen for it."""
        if choice is not None and choice.pipeline == by:
            return
        if choice is not None:
            self.ended(choice.pipeline)
        if by in self._pipelines:
            self._pipelines[by].change(+1, now_s=self._clock())

    def ended(self, pipeline: PipelineId, tokens: Sequence[int] = ()) -> None:
        """A request is no longer there; `tokens` are all it had computed, prompt included."""
        known = self._pipelines.get(pipeline)
        if known is not None:
            known.change(-1, now_s=self._clock())
            known.memory.remember(self._digests(tokens))

    def lost(self, pipeline: PipelineId) -> None:
        """It was seen to fail; it is not chosen before it has been heard of again."""
        known = self._pipelines.get(pipeline)
        if known is not None:
            known.suspected_s = self._clock()

    def is_gone(self, pipeline: PipelineId) -> bool:
        """Not heard of for long by a directory that has answered all the while: if anybody still
        waits for its words, nothing will come. Twice as long as it takes to be forgotten."""
        now_s = self._clock()
        is_answering = now_s - self._refreshed_s <= self._expiry_s
        has_looked = now_s - self._answering_s > 2 * self._expiry_s
        heard_s = self._heard_s.get(pipeline, float("-inf"))
        return is_answering and has_looked and now_s - heard_s > 2 * self._expiry_s

    def describe(self) -> list[dict[str, object]]:
        """Plain JSON, for tests and an operator's eyes."""
        return [
            {
                "pipeline": name,
                "load": pipeline.load,
                "is_usable": pipeline.is_usable,
                "num_blocks": len(pipeline.memory),
            }
            for name, pipeline in self._pipelines.items()
        ]

    def _digests(self, tokens: Sequence[int]) -> list[bytes]:
        return block_digests(tokens, block_size=self._block_size, max_blocks=self._max_blocks)

    def _cached_tokens(
        self,
        usable: dict[PipelineId, _Pipeline],
        speeds: dict[PipelineId, float],
        *,
        digests: Sequence[bytes],
        num_tokens: int,
    ) -> dict[PipelineId, int]:
        """Prompt tokens a pipeline need not compute; 0 where too much else is going on."""
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
        """Those with the longest cached prefix, and two drawn at random, fast ones more often."""
        most = max(cached.values())
        holders = {name for name, count in cached.items() if count == most > 0}
        drawn: set[PipelineId] = set()
        left = dict(speeds)
        while left and len(drawn) < 2:
            name = self._rng.choices(list(left), weights=list(left.values()))[0]
            drawn.add(name)
            del left[name]
        return holders | drawn


def _speeds(pipelines: dict[PipelineId, _Pipeline]) -> dict[PipelineId, float]:
    """Relative to the fastest; one that nobody measured is taken to be as fast."""
    weights = [p.report.weight for p in pipelines.values() if p.report.weight is not None]
    fastest = max(weights, default=1.0)
    speeds = {
        name: 1.0 if p.report.weight is None else p.report.weight / fastest
        for name, p in pipelines.items()
    }
    return {name: 1.0 if speed >= _AS_FAST else speed for name, speed in speeds.items()}
