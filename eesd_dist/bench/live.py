"""Times variants in alternation on one real engine, and compares every text with plain decoding.

A `Race` is a sequence of blocks; in each block every variant does the same work, in an order that
rotates from block to block, so that a slower machine affects all of them. Ratios are of sums over
blocks, with a bootstrap interval over blocks. Does not depend on controllers.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from eesd_dist.bench.crowds import Crowd, Guest
from eesd_dist.bench.replay import Variant
from eesd_dist.bench.traces import Text
from eesd_dist.engine.core import EngineCore
from eesd_dist.statistics import Interval, Rows, bootstrap
from eesd_dist.types import Request, RequestId, RoundStats, TokenId

PLAIN = Variant(label="plain", controller=None)


@dataclass(slots=True, kw_only=True)
class Pass:
    """Results of one variant in one block."""

    seconds: float = 0.0
    tokens: int = 0
    texts: list[tuple[TokenId, ...]] = field(default_factory=list)
    rounds: list[RoundStats] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    largest_batch: int = 0

    def count(self, stats: RoundStats) -> None:
        self.rounds.append(stats)
        self.drafted += stats.num_drafted
        self.accepted += stats.num_accepted
        self.largest_batch = max(self.largest_batch, stats.num_requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Results of a race: for each block, each variant's pass."""

    blocks: tuple[dict[str, Pass], ...]

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self.blocks[0])

    def rate(self, label: str) -> float:
        return _rate([block[label] for block in self.blocks])

    def rounds(self, label: str) -> list[RoundStats]:
        return [stats for block in self.blocks for stats in block[label].rounds]

    def ratio(self, label: str, over: str) -> float:
        return self.rate(label) / self.rate(over)

    def median_ratio(self, label: str, over: str) -> float:
        """Returns the median of the blocks' ratios, robust to a disturbance in one block."""
        return statistics.median(
            _rate([block[label]]) / _rate([block[over]]) for block in self.blocks
        )

    def interval(self, label: str, over: str, *, share: float = 0.9) -> Interval:
        """Returns a bootstrap interval over blocks."""
        passes = [[block[name] for block in self.blocks] for name in (label, over)]
        tokens, other_tokens = (np.array([run.tokens for run in runs]) for runs in passes)
        seconds, other_seconds = (np.array([run.seconds for run in runs]) for runs in passes)

        def ratio(rows_of: Sequence[Rows]) -> NDArray[np.float64]:
            (rows,) = rows_of
            rate = tokens[rows].sum(axis=-1) / seconds[rows].sum(axis=-1)
            other_rate = other_tokens[rows].sum(axis=-1) / other_seconds[rows].sum(axis=-1)
            return np.asarray(rate / other_rate)

        return bootstrap(ratio, [len(self.blocks)], share=share)

    @property
    def fixed(self) -> tuple[str, ...]:
        """Labels of the fixed lengths; plain decoding is the fixed length 0."""
        return tuple(v for v in self.labels if v == PLAIN.label or v.startswith("fixed"))

    @property
    def best_fixed(self) -> str:
        """The fastest fixed length in hindsight, by the figures it is then compared with."""
        return max(self.fixed, key=self.rate)

    @property
    def texts_unlike_plain(self) -> int:
        return sum(
            text != plain
            for block in self.blocks
            for run in block.values()
            for text, plain in zip(run.texts, block[PLAIN.label].texts, strict=True)
        )


def _arrives(guest: Guest, emitted: int, running: int) -> bool:
    has_room = guest.max_running is None or running < guest.max_running
    return has_room and guest.after_tokens <= emitted


def _rate(passes: Sequence[Pass]) -> float:
    return sum(run.tokens for run in passes) / sum(run.seconds for run in passes)


class Track:
    """An engine and the texts to run on it."""

    def __init__(
        self,
        engine: EngineCore,
        texts: Sequence[Text],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self._texts = texts
        self._clock = clock
        self._count = 0

    def warm_up(self, variants: Sequence[Variant]) -> None:
        """Runs a few tokens of each variant, so that compilation and allocation are not timed."""
        few = tuple(Guest(text=number) for number in range(min(2, len(self._texts))))
        for variant in variants:
            self._run(few, variant, Pass(), max_tokens=4)

    def race(
        self,
        blocks: Sequence[Sequence[Crowd]],
        variants: Sequence[Variant],
    ) -> Race:
        """Runs each block's crowds with every variant; plain decoding has to be one of them."""
        done: list[dict[str, Pass]] = []
        for number, crowds in enumerate(blocks):
            turn = number % len(variants)
            order = [*variants[turn:], *variants[:turn]]
            if number % 2:
                order.reverse()
            passes = {variant.label: Pass() for variant in variants}
            for variant in order:
                for crowd in crowds:
                    self._run(crowd, variant, passes[variant.label])
            done.append(passes)
        return Race(blocks=tuple(done))

    def _run(
        self,
        crowd: Crowd,
        variant: Variant,
        into: Pass,
        *,
        max_tokens: int | None = None,
    ) -> None:
        """Runs and times a crowd to its last token."""
        engine = self._engine
        waiting = deque((guest, self._request(guest, variant, max_tokens)) for guest in crowd)
        written: dict[RequestId, list[TokenId]] = {request.request_id: [] for _, request in waiting}
        emitted = running = 0
        started = self._clock()
        while waiting or running:
            while waiting and (not running or _arrives(waiting[0][0], emitted, running)):
                engine.add(waiting.popleft()[1])
                running += 1
            result = engine.step(wait_s=0.0)
            for stats in result.rounds:
                into.count(stats)
            for emission in result.emissions:
                written[emission.request_id].extend(emission.tokens)
                emitted += len(emission.tokens)
                running -= emission.finish_reason is not None
        into.seconds += self._clock() - started
        into.tokens += emitted
        into.texts.extend(tuple(tokens) for tokens in written.values())

    def _request(self, guest: Guest, variant: Variant, max_tokens: int | None) -> Request:
        """Returns a request; its workload pools beliefs by variant and class, so that variants do
        not warm each other."""
        self._count += 1
        text = self._texts[guest.text]
        sampling = text.sampling()
        if max_tokens is not None:
            sampling = text.sampling(more_tokens=max_tokens - text.max_tokens)
        return Request(
            request_id=RequestId(f"{variant.label}-{self._count}"),
            prompt=text.prompt,
            sampling=sampling,
            speculation=variant.params,
            workload=f"{variant.label}/{text.workload}",
        )
