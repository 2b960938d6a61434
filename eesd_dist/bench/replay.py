"""Replays recorded guesses with any controller: the engine's rounds with modelled time.

The round loop makes the same calls to a `DraftPolicy` as the draft stage, and takes the verdicts
from the trace. Drafts, verdicts and beliefs are therefore those of
the engine; only seconds are computed, from a measured `CostModel`. Does not depend on the engine.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from eesd_dist.bench.crowds import Crowd, all_at_once
from eesd_dist.bench.traces import Trace
from eesd_dist.config import SpeculationConfig
from eesd_dist.control.belief import Belief
from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.chain_rule import ChainReport, ChainRule, follow
from eesd_dist.control.cost import CostModel
from eesd_dist.control.policy import DraftPolicy
from eesd_dist.control.tree_growth import Offer
from eesd_dist.routing.beliefs import BeliefBook
from eesd_dist.types import Outcome, RequestId, SpeculationParams, TreeShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Way of drafting in a comparison."""

    label: str
    controller: str | None
    """None is plain decoding."""
    max_draft_tokens: int | None = None
    settings: tuple[tuple[str, object], ...] = ()
    """Keys of the speculation section that differ from the service's; replay only."""
    tree: TreeShape = "none"
    """Live only: traces have chains only."""

    @property
    def params(self) -> SpeculationParams:
        if self.controller is None:
            return SpeculationParams(mode="off")
        return SpeculationParams(
            controller=self.controller, max_draft_tokens=self.max_draft_tokens, tree=self.tree
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySetting:
    """Settings shared by all variants of one comparison."""

    speculation: SpeculationConfig
    cost: CostModel
    calibrator: Calibrator | None
    max_running: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedRound:
    """A request's part of a round."""

    request: int
    """Index in the crowd."""
    at: int
    outcome: Outcome
    rests: bool = False
    """True if its controller left it out of the round, so that nothing learns from it."""


@dataclass(slots=True, kw_only=True)
class Replayed:
    """Results of a replayed run."""

    seconds: list[float] = field(default_factory=list)
    """Modelled time of each round."""
    rounds: list[tuple[ReplayedRound, ...]] = field(default_factory=list)
    tokens: int = 0

    @property
    def total_s(self) -> float:
        return sum(self.seconds)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.total_s

    @property
    def outcomes(self) -> list[Outcome]:
        return [turn.outcome for turns in self.rounds for turn in turns]

    @property
    def verdicts(self) -> list[Outcome]:
        """The outcomes that policy and beliefs have learnt from."""
        return [turn.outcome for turns in self.rounds for turn in turns if not turn.rests]


Lengths = Callable[[Trace, int], int]
"""Trace and position -> draft length, with knowledge of the trace."""


def accepted_length(trace: Trace, at: int) -> int:
    """Returns the per-round oracle's length: exactly what will be accepted."""
    return trace.guesses[at].num_accepted


class Replayer:
    """Replays one variant; beliefs are kept from run to run."""

    def __init__(
        self, variant: Variant, setting: ReplaySetting, *, book: BeliefBook | None = None
    ) -> None:
        self._variant = variant
        self._setting = setting
        self._speculation = setting.speculation.model_copy(update=dict(variant.settings))
        self._policy = DraftPolicy(
            speculation=self._speculation, cost=setting.cost, calibrator=setting.calibrator
        )
        self._book = book

    def run(
        self,
        traces: Sequence[Trace],
        crowd: Crowd | None = None,
        *,
        lengths: Lengths | None = None,
        tag: str = "replay",
    ) -> Replayed:
        """Runs the requests of a crowd to their ends; None: one of each trace, all at once.

        `lengths` decides instead of the controller; `tag` is the prefix of the request ids, which
        seed their draws.
        """
        waiting = deque(enumerate(crowd or all_at_once(len(traces))))
        live: dict[RequestId, _Reader] = {}
        run = Replayed()
        while waiting or live:
            while (
                waiting
                and len(live) < self._setting.max_running
                and len(live) < (waiting[0][1].max_running or len(live) + 1)
                and (waiting[0][1].after_tokens <= run.tokens or not live)
            ):
                index, guest = waiting.popleft()
                reader = self._admit(index, traces[guest.text], tag=tag)
                live[reader.request_id] = reader
            levels = _draft(list(live.values()), self._policy, lengths)
            run.seconds.append(_seconds(self._setting.cost, list(live.values()), levels))
            self._commit(live, run)
        return run

    def _admit(self, index: int, trace: Trace, *, tag: str) -> "_Reader":
        reader = _Reader(
            RequestId(f"{tag}-{index}"), index, trace, self._variant, self._speculation
        )
        workload = f"{self._variant.label}/{trace.workload}"
        belief = Belief()
        if self._book is not None:
            belief = self._book.admit(reader.request_id, workload).belief
        self._policy.admit(reader.request_id, self._variant.controller, belief)
        return reader

    def _commit(self, live: dict[RequestId, "_Reader"], run: Replayed) -> None:
        """Takes the verdicts, counts tokens, updates policy and book, drops finished requests."""
        turns = tuple(
            ReplayedRound(
                request=reader.index,
                at=reader.at,
                outcome=reader.trace.outcome(request_id, reader.at, reader.drafted),
                rests=reader.rests,
            )
            for request_id, reader in live.items()
        )
        run.rounds.append(turns)
        learnt = [
            turn.outcome
            for turn in turns
            if live[turn.outcome.request_id].drafts and not turn.rests
        ]
        self._policy.observe(learnt)
        if self._book is not None:
            self._book.observe(learnt)
        for request_id, reader in list(live.items()):
            after = reader.trace.after(reader.at, reader.drafted)
            run.tokens += after - reader.at
            reader.at = after
            if after == len(reader.trace):
                del live[request_id]
                self._policy.end(request_id)
                if self._book is not None:
                    self._book.finish(request_id)


def replay(
    traces: Sequence[Trace],
    variant: Variant,
    setting: ReplaySetting,
    *,
    crowd: Crowd | None = None,
    lengths: Lengths | None = None,
    tag: str = "replay",
) -> Replayed:
    """Replays one run without earlier beliefs."""
    return Replayer(variant, setting).run(traces, crowd, lengths=lengths, tag=tag)


class _Reader:
    """A request that takes its text from a trace."""

    def __init__(
        self,
        request_id: RequestId,
        index: int,
        trace: Trace,
        variant: Variant,
        speculation: SpeculationConfig,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.trace = trace
        self.drafts = variant.controller is not None
        own = speculation.max_draft_tokens
        if variant.max_draft_tokens is not None:
            own = min(own, variant.max_draft_tokens)
        self._ceiling = own if self.drafts else 0
        self.at = 0
        self.drafted = 0
        self.rests = False
        """True if its controller left it out of the round."""

    @property
    def room(self) -> int:
        return self.trace.room(self.at, ceiling=self._ceiling)

    @property
    def num_known(self) -> int:
        return self.trace.num_known(self.at)

    @property
    def temperature(self) -> float:
        return self.trace.guesses[self.at].evidence[0].temperature

    @property
    def gaps(self) -> list[float]:
        """Score gaps of the tokens that may be drafted."""
        return [evidence.gap for evidence in self.trace.guesses[self.at].evidence[: self.room]]

    def offer(self) -> Offer:
        return Offer(
            request_id=self.request_id,
            evidence=self.trace.guesses[self.at].evidence[self.drafted],
            parent=self.drafted - 1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """Level of a round: number of guesses, and of those drafted."""

    offered: int
    chosen: int


def _draft(
    readers: Sequence[_Reader], policy: DraftPolicy, lengths: Lengths | None
) -> list[_Level]:
    """Drafts like the draft stage: by the controllers' rules where they can give them, else level
    by level, over all requests that still draft."""
    for reader in readers:
        reader.drafted, reader.rests = 0, False
    active = [reader for reader in readers if reader.room > 0]
    if lengths is not None:
        return _draft_by_lengths(active, lengths)
    levels: list[_Level] = []
    num_rows = sum(reader.num_known for reader in readers)
    drafting_ids = policy.begin_round(
        [reader.request_id for reader in active],
        num_requests=len(readers),
        num_known=num_rows,
        num_prefill=num_rows - len(readers),
    )
    for reader in active:
        reader.rests = reader.request_id not in drafting_ids
    active = [reader for reader in active if not reader.rests]
    rules = policy.chain_rules({reader.request_id: reader.temperature for reader in active})
    if len(rules) == len(active):
        return _draft_by_rules(active, rules, policy)
    while active:
        worth = policy.worth_a_guess([reader.request_id for reader in active])
        active = [reader for reader in active if reader.request_id in worth]
        choices = policy.choose([reader.offer() for reader in active]) if active else []
        going_on = [reader for reader, is_chosen in zip(active, choices, strict=True) if is_chosen]
        for reader in going_on:
            reader.drafted += 1
        levels.append(_Level(offered=len(active), chosen=len(going_on)))
        active = [reader for reader in going_on if reader.drafted < reader.room]
    return levels


def _draft_by_rules(
    readers: Sequence[_Reader], rules: Mapping[RequestId, ChainRule], policy: DraftPolicy
) -> list[_Level]:
    reports: dict[RequestId, ChainReport] = {}
    for reader in readers:
        reports[reader.request_id] = follow(rules[reader.request_id], reader.gaps)
        reader.drafted = reports[reader.request_id].num_drafted
    policy.report(reports)
    guesses = [len(report.means) for report in reports.values()]
    drafted = [reader.drafted for reader in readers]
    return [
        _Level(
            offered=sum(count > depth for count in guesses),
            chosen=sum(count > depth for count in drafted),
        )
        for depth in range(max(guesses, default=0))
    ]


def _draft_by_lengths(active: Sequence[_Reader], lengths: Lengths) -> list[_Level]:
    for reader in active:
        reader.drafted = min(reader.room, lengths(reader.trace, reader.at))
    longest = max((reader.drafted for reader in active), default=0)
    counts = [sum(reader.drafted > level for reader in active) for level in range(longest)]
    return [_Level(offered=count, chosen=count) for count in counts]


def _seconds(cost: CostModel, readers: Sequence[_Reader], levels: Sequence[_Level]) -> float:
    """Returns the seconds of a round: `CostModel.batch_seconds`, and guesses that are dropped."""
    wasted = sum(
        max(0.0, cost.guess_batch(level.offered) - cost.guess_batch(level.chosen))
        for level in levels
    )
    lengths = [reader.drafted for reader in readers]
    num_rows = sum(reader.num_known for reader in readers)
    return cost.batch_seconds(lengths, num_known=num_rows) + wasted


@dataclass(frozen=True, slots=True, kw_only=True)
class Clairvoyant:
    """The fastest schedule for one text alone, with knowledge of all guesses."""

    remaining_s: tuple[float, ...]
    """Seconds from each position to the end; the last entry, at the end, is 0."""
    lengths: tuple[int, ...]

    @staticmethod
    def of(trace: Trace, *, cost: CostModel, ceiling: int) -> "Clairvoyant":
        """Computes the schedule by dynamic programming from the end; a round leads to `after`."""
        lengths = range(ceiling + 1)
        first = [cost.batch_seconds([k], num_known=trace.num_prompt) for k in lengths]
        steady = [cost.batch_seconds([k]) for k in lengths]
        remaining = [0.0] * (len(trace) + 1)
        best = [0] * len(trace)
        for at in reversed(range(len(trace))):
            price = steady if at else first
            options = [
                (price[length] + remaining[trace.after(at, length)], length)
                for length in range(trace.room(at, ceiling=ceiling) + 1)
            ]
            remaining[at], best[at] = min(options)
        return Clairvoyant(remaining_s=tuple(remaining), lengths=tuple(best))

    def regret(self, run: Replayed, trace: Trace) -> list[float]:
        """Returns the seconds lost in each round of a run over this text alone.

        A round from i that took s seconds and led to j lost s + remaining(j) - remaining(i). Never
        negative; the sum is the run's total delay.
        """
        lost = []
        for seconds, (turn,) in zip(run.seconds, run.rounds, strict=True):
            after = trace.after(turn.at, turn.outcome.num_drafted)
            lost.append(seconds + self.remaining_s[after] - self.remaining_s[turn.at])
        return lost


def lengths_by_position(run: Replayed) -> Mapping[int, int]:
    """Returns the draft length by start position of the rounds of a run over one text."""
    return {turn.at: turn.outcome.num_drafted for (turn,) in run.rounds}
