"""Measures the cost of drafting and verifying on this machine, before the first request.

Runs real rounds through the real stages on unused pages: of one request for every draft length, of
several requests on a sparse grid. The controllers use the figures.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import torch

from eesd_dist.backends.api import ChainStart, engine_on
from eesd_dist.config import SpeculationConfig
from eesd_dist.control.belief import Belief
from eesd_dist.control.chain_rule import REFUSAL, of_length
from eesd_dist.control.cost import CostModel
from eesd_dist.control.fitting import isotonic
from eesd_dist.control.policy import DraftPolicy
from eesd_dist.control.tree_growth import Offer
from eesd_dist.engine.drafting.stage import DraftStage
from eesd_dist.model.attention.pages import PROFILED_POSITIONS
from eesd_dist.model.attention.rows import RowSegment
from eesd_dist.page_table import PageTable
from eesd_dist.schedule.live import LiveRequest
from eesd_dist.schedule.plans import PlanItem, RoundPlan
from eesd_dist.transport.contracts import RoundHeader, Segment, VerifyChannel
from eesd_dist.types import ChoiceParams, Request, RequestId, SamplingParams, TokenId

_REPEATS = 8
_FEWEST = 3
_WARM_UPS = 2
_LEAST_SHARE = 0.1
"""Least share of a draft's time that its tokens take: noise must not make them look free."""
_LEAST_MORE = 128
"""Minimum difference of the two contexts at which rounds are measured."""
_POINT_S = 0.05
"""Time for one figure; slow rounds are repeated less often, but at least `_FEWEST` times."""


Run = Callable[[], object]


class _Refusing(DraftPolicy):
    """Policy that wants guesses and drafts none of them."""

    def choose(self, offers: Sequence[Offer]) -> list[bool]:
        return [False] * len(offers)


def measure_cost(
    draft: DraftStage,
    channel: VerifyChannel,
    *,
    page_size: int,
    num_pages: int,
    max_draft_tokens: int,
    epoch: int,
    max_running: int = 1,
) -> CostModel:
    """Measures drafting and verifying, in seconds, for one request and for batches of up to
    `max_running`.

    Drafts that do not fit into the pages or the positions are not measured: they get the cost of
    the longest draft that fits.

    Figures are lower quartiles: on a shared machine disturbances only make a run longer. Rounds
    that are compared run in turn, so that one disturbance is not in all runs of one figure. Times
    are made non-decreasing over the row counts: remaining noise does not make a row look free.
    """
    longest = max_draft_tokens + 1
    num = min(num_pages, -(-(longest + 2 * page_size) // page_size))
    positions = draft.span.spec.max_position_embeddings
    start = max(0, min(num * page_size - page_size // 2, positions) - longest)
    kv_range = _KvRange(start=start, pages=PageTable(range(num)))
    long_range = _KvRange.long(num_pages, page_size, positions, longest)
    fitting = min(longest, min(num * page_size, positions) - start)
    bench = _Bench(draft=draft, channel=channel, kv_range=kv_range, epoch=epoch)
    bench.capture(max_running, fitting=fitting)
    sizes = _batch_sizes(max_running)
    num_single = min(8, max_running, longest)
    *rows_s, singles_s = bench.usual_s(
        [bench.verify_run([rows]) for rows in range(1, fitting + 1)]
        + [bench.verify_run([fitting] * size) for size in sizes]
        + [bench.verify_run([1] * num_single)]
    )
    verify_s = isotonic(rows_s[:fitting])
    verify_s += [verify_s[-1]] * (longest - fitting)
    # What a request costs in addition to its rows: several of one row against one of as many rows.
    request_s = max(singles_s - verify_s[num_single - 1], 0.0) / max(num_single - 1, 1)
    batches = [
        seconds - request_s * (size - 1)
        for size, seconds in zip(sizes, rows_s[fitting:], strict=True)
    ]
    # A draft of a few tokens, since the first costs more: the exit head also reads the known row.
    length = min(4, max_draft_tokens, fitting - 1)
    runs = [bench.draft_run(size, tokens) for tokens in (0, length) for size in (1, *sizes)]
    measured_s = bench.usual_s(runs)
    committed_s = isotonic(measured_s[: len(sizes) + 1])
    drafts_s = measured_s[len(sizes) + 1 :]
    steps_s = isotonic(
        [
            max(d - k, _LEAST_SHARE * d) / max(length, 1)
            for d, k in zip(drafts_s, committed_s, strict=True)
        ]
    )
    guess_s = steps_s[0] - (bench.row_s() if length else 0.0)
    context_s, row_context_s, draft_context_s = _context_costs(
        bench, replace(bench, kv_range=long_range), fitting=fitting, length=length
    )
    return CostModel(
        draft_step_s=steps_s[0],
        round_s=committed_s[0],
        # Every length is measured: kernels compute rows in blocks, so that times rise in steps.
        verify_s=tuple(verify_s),
        guess_s=min(max(guess_s, 0.0), steps_s[0]),
        request_s=request_s,
        verify_rows_s=tuple(
            (fitting * size, max(seconds, verify_s[-1]))
            for size, seconds in zip(sizes, isotonic(batches), strict=True)
        ),
        draft_rows_s=tuple(zip(sizes, steps_s[1:], strict=True)),
        known_rows_s=tuple(zip(sizes, committed_s[1:], strict=True)),
        context=start,
        context_s=context_s,
        row_context_s=row_context_s,
        draft_context_s=draft_context_s,
    )


def _context_costs(
    bench: "_Bench", long: "_Bench", *, fitting: int, length: int
) -> tuple[float, float, float]:
    """Measures seconds by stored position: of a request, of a row in addition, and of a row in the
    draft stage. `long`: the same bench at a long context; `length`: of the drafts."""
    more = long.kv_range.start - bench.kv_range.start
    if more < _LEAST_MORE:
        return 0.0, 0.0, 0.0
    runs = [
        run
        for b in (bench, long)
        for run in (b.verify_run([1]), b.verify_run([fitting]), b.draft_run(1, length))
    ]
    measured_s = bench.usual_s(runs)
    request_s, rows_s, draft_s = (
        max(long_s - short_s, 0.0) / more
        for short_s, long_s in zip(measured_s[:3], measured_s[3:], strict=True)
    )
    row_s = min(max(rows_s - request_s, 0.0) / max(fitting - 1, 1), request_s)
    return request_s - row_s, row_s, draft_s / (1 + length)


def _batch_sizes(max_running: int) -> list[int]:
    """Returns 2, 4, 16, ... and `max_running`."""
    sizes = [size for size in (2, 4, 16, 64, 256) if size < max_running]
    return [*sizes, max_running] if max_running > 1 else []


@dataclass(frozen=True, slots=True, kw_only=True)
class _KvRange:
    """The pages that measured rounds write to, shared by all requests: their content is unused."""

    start: int
    pages: PageTable

    @classmethod
    def long(cls, num_pages: int, page_size: int, positions: int, num_rows: int) -> "_KvRange":
        """Returns a range with as many positions before its rows as are profiled."""
        num = min(num_pages * page_size, positions, PROFILED_POSITIONS)
        pages = PageTable(range(-(-num // page_size)))
        return cls(start=max(num - num_rows, 0), pages=pages)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    draft: DraftStage
    channel: VerifyChannel
    kv_range: _KvRange
    epoch: int
    round_ids: Iterator[int] = field(default_factory=count)
    """Ids of rounds, a new one for each: a rank that stays in one round makes no progress."""

    def capture(self, max_running: int, *, fitting: int) -> None:
        """Runs rounds of every number of rows that the device captures: verify passes of up to
        `fitting` rows a request, and drafts of a token. Those of longer contexts, which are divided
        among more programs, are captured when they first come up."""
        for num_rows in engine_on(self.draft.device).captured_rows:
            num = -(-num_rows // fitting)
            if num > max_running:
                break
            self._verify([fitting] * (num - 1) + [num_rows - fitting * (num - 1)])
            if num_rows <= max_running and fitting > 1:
                self._draft(num_rows, 1)

    def verify_run(self, rows: Sequence[int]) -> Run:
        """Returns a verify pass over `rows`, a row count per request."""
        return partial(self._verify, rows)

    def draft_run(self, num: int, length: int) -> Run:
        """Returns known rows and drafts of `length` tokens of `num` requests."""
        return partial(self._draft, num, length)

    def row_s(self) -> float:
        """Measures what a drafted token costs after its guess: a draft of one token against a guess
        that is not taken."""
        drafter = self.draft.drafter
        runs: list[Run]
        if drafter is None:
            runs = [partial(self._draft, 1, 1, kind) for kind in (_Refusing, DraftPolicy)]
        else:
            segment = RowSegment(self.kv_range.start, 1, self.kv_range.pages)
            runs = [
                partial(drafter.draft, [ChainStart([0], segment, 1, rule)])
                for rule in (REFUSAL, of_length(1))
            ]
        refusal_s, token_s = self.usual_s(runs)
        return token_s - refusal_s

    def usual_s(self, runs: Sequence[Run]) -> list[float]:
        """Measures runs in turn, each until the device is done: a draft only queues rows that no
        guess follows."""

        def settled(run: Run) -> None:
            run()
            engine_on(self.draft.device).synchronize(self.draft.device)

        return _usual([partial(settled, run) for run in runs])

    def _draft(self, num: int, length: int, kind: type[DraftPolicy] = DraftPolicy) -> None:
        fixed = SpeculationConfig(controller="fixed", fixed_length=length)
        policy = kind(speculation=fixed, cost=None, calibrator=None)
        items = tuple(self._item(f"rehearsal-{i}", length) for i in range(num))
        for item in items:
            policy.admit(item.live.request_id, None, Belief())
        self.draft.draft(RoundPlan(microbatch=0, items=items, preempted=()), policy)
        for item in items:
            self.draft.forget(item.live.request_id)

    def _item(self, name: str, length: int) -> PlanItem:
        start = self.kv_range.start
        request = Request(
            request_id=RequestId(name),
            prompt=(TokenId(0),) * (start + 1),
            sampling=SamplingParams(temperature=0.0, max_tokens=length + 2),
        )
        live = LiveRequest(
            request,
            ticket=0,
            arrival_s=0.0,
            max_model_len=start + length + 3,
            max_draft_tokens=length,
        )
        return PlanItem(
            live=live,
            start=start,
            num_known=1,
            is_final=True,
            max_draft=length,
            pages=self.kv_range.pages,
        )

    def _verify(self, rows: Sequence[int]) -> None:
        span = self.draft.span
        hidden_TD = torch.zeros(
            sum(rows), span.spec.hidden_size, dtype=span.compute_dtype, device=self.draft.device
        )
        segments = tuple(
            greedy_segment(start=self.kv_range.start, num_rows=num, pages=self.kv_range.pages)
            for num in rows
        )
        header = RoundHeader(epoch=self.epoch, round_id=next(self.round_ids), segments=segments)
        self.channel.send(header, hidden_TD)
        self.channel.receive()


def _usual(runs: Sequence[Run]) -> list[float]:
    """Returns the lower quartiles of the runs' times in seconds. The runs take turns."""
    took: list[list[float]] = [[] for _ in runs]
    while remaining := [i for i, times in enumerate(took) if not _is_enough(times)]:
        for i in remaining:
            started = time.perf_counter()
            runs[i]()
            took[i].append(time.perf_counter() - started)
    return [_lower_quartile(times) for times in took]


def _is_enough(times: Sequence[float]) -> bool:
    if len(times) == _WARM_UPS + _REPEATS:
        return True
    return len(times) > _FEWEST and sum(times) > _POINT_S


def _lower_quartile(times: Sequence[float]) -> float:
    settled = times[_WARM_UPS:] if len(times) > _WARM_UPS + _FEWEST else times[1:]
    return statistics.quantiles(settled, n=4, method="inclusive")[0]


def greedy_segment(*, start: int, num_rows: int, pages: Sequence[int]) -> Segment:
    """Returns rows of a greedy request without further options, all of them sampled."""
    return Segment(
        start=start,
        num_rows=num_rows,
        num_sampled=num_rows,
        pages=PageTable.of(pages),
        tokens=(0,) * num_rows,
        history=(),
        num_prompt=start,
        params=ChoiceParams(temperature=0.0),
    )
