"""Cost model: the seconds of a draft, and the length with the most tokens per second.

Computes tokens per second from survival probabilities and a start-up profile, for one request and
for a batch. Does not depend on how the figures were measured or how acceptance is estimated.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from eesd_dist.errors import ConfigError

Points = tuple[tuple[int, float], ...]
"""(count, seconds), counts ascending; seconds are interpolated between two counts, and extrapolated
with the last slope beyond the last one."""


_LEAST_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of a round, as measured on this machine."""

    draft_step_s: float
    """Seconds of one drafted token through layers [0, N) and the exit head."""
    verify_s: tuple[float, ...]
    """verify_s[i]: a verify pass over i + 1 rows of one request. A draft of k tokens has k + 1
    rows; beyond the table `verify_rows_s` applies, or the slope of the table."""
    round_s: float = 0.0
    """Fixed cost of a round of any length: first token through [0, N), transfer, planning."""
    guess_s: float = 0.0
    """The exit head's guess, a part of draft_step_s: also paid for a guess that is not drafted."""
    request_s: float = 0.0
    """Cost of each further request in a verify pass in addition to its rows: attention calls."""
    verify_rows_s: Points = ()
    """A verify pass over more rows than `verify_s` has, by rows, without `request_s`."""
    draft_rows_s: Points = ()
    """Seconds of one drafted token for each request of a batch, by number of requests."""
    known_rows_s: Points = ()
    """`round_s` by number of requests."""
    start_s: float = 0.0
    """Seconds of a round with drafts in addition to its tokens, whatever their number."""
    lookup_s: float = 0.0
    """Seconds of a draft found by prompt lookup in addition to its tokens."""
    context: int = 0
    """Stored positions of each request at which the figures above apply; `at` converts them."""
    context_s: float = 0.0
    """A verify pass, by stored position of each request: reading its keys and values."""
    row_context_s: float = 0.0
    """The same by row in addition, for attending the row."""
    draft_context_s: float = 0.0
    """A row of a request through layers [0, N), by stored position."""

    def __post_init__(self) -> None:
        if not self.verify_s or min(self.verify_s) <= 0 or self.draft_step_s < 0:
            raise ConfigError(
                f"cost model: found draft_step_s={self.draft_step_s}, verify_s={self.verify_s}, "
                "expected at least one positive verify time: run the start-up profile again"
            )

    def at(self, context: int) -> "CostModel":
        """Returns the figures that apply with so many stored positions of each request; at a
        shorter context they are at least a tenth of what they were."""
        more = context - self.context
        if not more or not (self.context_s or self.row_context_s or self.draft_context_s):
            return self
        request_s, row_s, step_s = (
            more * seconds for seconds in (self.context_s, self.row_context_s, self.draft_context_s)
        )
        return replace(
            self,
            context=context,
            draft_step_s=_sum(self.draft_step_s, step_s),
            verify_s=tuple(
                _sum(seconds, request_s + row_s * rows)
                for rows, seconds in enumerate(self.verify_s, start=1)
            ),
            round_s=_sum(self.round_s, step_s),
            request_s=max(self.request_s + request_s, 0.0),
            verify_rows_s=_changed(self.verify_rows_s, request_s, row_s),
            draft_rows_s=_changed(self.draft_rows_s, 0.0, step_s),
            known_rows_s=_changed(self.known_rows_s, 0.0, step_s),
        )

    def verify(self, num_drafted: int) -> float:
        """Returns v(k), the seconds to verify a draft of k tokens."""
        return self.verify_batch(num_drafted + 1, 1)

    def seconds(self, num_drafted: int) -> float:
        """Returns the seconds of a whole round with a draft of k tokens."""
        start_s = self.start_s if num_drafted else 0.0
        drafting_s = start_s + num_drafted * self.draft_step_s
        return self.round_s + drafting_s + self.verify(num_drafted)

    def rate(self, num_drafted: int, survival: Sequence[float]) -> float:
        """Returns expected tokens per second; survival[j]: P(drafts 0..j are all accepted)."""
        return (1.0 + sum(survival[:num_drafted])) / self.seconds(num_drafted)

    def verify_batch(self, rows: int, requests: int = 1) -> float:
        """Returns the seconds of a verify pass over `rows` rows, known and drafted, in total."""
        extra = self.request_s * max(requests - 1, 0)
        if rows <= len(self.verify_s):
            return self.verify_s[max(rows, 1) - 1] + extra
        beyond = [point for point in self.verify_rows_s if point[0] > len(self.verify_s)]
        if beyond:
            return interpolated([(len(self.verify_s), self.verify_s[-1]), *beyond], rows) + extra
        return self.verify_s[-1] + self._table_slope() * (rows - len(self.verify_s)) + extra

    def verify_batches(self, count: int) -> list[float]:
        """Returns the seconds of `verify_batch` for one request and 0, 1, ... `count` - 1 rows."""
        table, num = self.verify_s, len(self.verify_s)
        seconds = [table[0], *table[: max(count - 1, 0)]][:count]
        points = [(num, table[-1]), *(point for point in self.verify_rows_s if point[0] > num)]
        if len(points) == 1:
            points.append((num + 1, table[-1] + self._table_slope()))
        for at, ((low, low_s), (high, high_s)) in enumerate(pairwise(points)):
            end = count if at == len(points) - 2 else min(high + 1, count)
            slope = max(high_s - low_s, 0.0) / (high - low)
            seconds += [low_s + slope * (rows - low) for rows in range(low + 1, end)]
        return seconds

    def draft_batch(self, rows: int) -> float:
        """Returns the seconds of one drafted token for each of `rows` requests."""
        return self._scaled(self.draft_step_s, self.draft_rows_s, rows)

    def guess_batch(self, rows: int) -> float:
        """Returns the exit head's part of `draft_batch`."""
        if self.draft_step_s <= 0.0:
            return 0.0
        return self.draft_batch(rows) * min(self.guess_s / self.draft_step_s, 1.0)

    def known_batch(self, requests: int) -> float:
        """Returns the seconds of a round in addition to drafting and verifying."""
        return self._scaled(self.round_s, self.known_rows_s, requests)

    def batch_seconds(
        self, lengths: Sequence[int], *, num_known: int | None = None, overlapped: bool = False
    ) -> float:
        """Returns the seconds of a round that drafts chains of these lengths.

        `num_known`: known rows of the round, if more than one per request. `overlapped`: another
        microbatch is verified while this one is drafted, so that the longer of the two counts.
        """
        num_rows = len(lengths) if num_known is None else num_known
        longest = max(lengths, default=0)
        levels = [sum(length > level for length in lengths) for level in range(longest)]
        drafting = self.known_batch(num_rows) + sum(map(self.draft_batch, levels))
        drafting += self.start_s if levels else 0.0
        verifying = self.verify_batch(num_rows + sum(lengths), len(lengths))
        return max(drafting, verifying) if overlapped else drafting + verifying

    def _table_slope(self) -> float:
        """Returns the last slope, at least the mean: noise may have made the last step flat."""
        last = len(self.verify_s) - 1
        if not last:
            return 0.0
        mean = (self.verify_s[last] - self.verify_s[0]) / last
        return max(self.verify_s[last] - self.verify_s[last - 1], mean, 0.0)

    def _scaled(self, row_s: float, points: Points, count: int) -> float:
        """Scales to `count` rows; without measurements like a verify pass, which has the same
        kernels."""
        if count <= 1:
            return row_s if count == 1 else 0.0
        if points and points[-1][0] > 1:
            return interpolated([(1, row_s), *(p for p in points if p[0] > 1)], count)
        return row_s * self.verify_batch(count) / self.verify_s[0]

    def to_json(self) -> dict[str, object]:
        return {
            "draft_step_s": self.draft_step_s,
            "verify_s": list(self.verify_s),
            "round_s": self.round_s,
            "guess_s": self.guess_s,
            "request_s": self.request_s,
            "verify_rows_s": [list(point) for point in self.verify_rows_s],
            "draft_rows_s": [list(point) for point in self.draft_rows_s],
            "known_rows_s": [list(point) for point in self.known_rows_s],
            "start_s": self.start_s,
            "lookup_s": self.lookup_s,
            "context": self.context,
            "context_s": self.context_s,
            "row_context_s": self.row_context_s,
            "draft_context_s": self.draft_context_s,
        }

    @staticmethod
    def from_json(data: Mapping[str, object]) -> "CostModel":
        """Parses a cost model; the costs of batches and of context may be left out."""
        verify_s = data.get("verify_s")
        if not isinstance(verify_s, Sequence):
            raise ConfigError(f"cost model: found verify_s={verify_s!r}, expected seconds")
        return CostModel(
            draft_step_s=_seconds(data.get("draft_step_s")),
            verify_s=tuple(_seconds(x) for x in verify_s),
            round_s=_seconds(data.get("round_s", 0.0)),
            guess_s=_seconds(data.get("guess_s", 0.0)),
            request_s=_seconds(data.get("request_s", 0.0)),
            verify_rows_s=_points(data.get("verify_rows_s", [])),
            draft_rows_s=_points(data.get("draft_rows_s", [])),
            known_rows_s=_points(data.get("known_rows_s", [])),
            start_s=_seconds(data.get("start_s", 0.0)),
            lookup_s=_seconds(data.get("lookup_s", 0.0)),
            context=_count(data.get("context", 0)),
            context_s=_seconds(data.get("context_s", 0.0)),
            row_context_s=_seconds(data.get("row_context_s", 0.0)),
            draft_context_s=_seconds(data.get("draft_context_s", 0.0)),
        )

    def save(self, file: Path) -> None:
        """Writes a file for `speculation.cost_file`, with which later runs skip the measurement."""
        file.write_text(json.dumps(self.to_json(), indent=2) + "\n")

    @staticmethod
    def load(file: Path) -> "CostModel":
        try:
            data = json.loads(file.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise ConfigError(
                f"cost model {file}: found {error}, expected a file from CostModel.save: measure "
                "it again, or leave speculation.cost_file empty"
            ) from error
        if not isinstance(data, dict):
            raise ConfigError(f"cost model {file}: found {str(data)[:40]}, expected an object")
        return CostModel.from_json(data)


NOMINAL_COST = CostModel(
    draft_step_s=0.1, verify_s=(1.0, 1.03), round_s=0.05, guess_s=0.06, draft_rows_s=((2, 0.11),)
)
"""Assumed cost if nothing was measured: drafting costs a tenth of verifying, and rows are almost
free. In units of a verify pass, not in seconds."""


def interpolated(points: Sequence[tuple[int, float]], count: int) -> float:
    """Interpolates linearly, extrapolates along the last segment, and never decreases; below the
    first count it is the first value."""
    if count <= points[0][0] or len(points) == 1:
        return points[0][1]
    right = next((i for i, point in enumerate(points) if point[0] >= count), len(points) - 1)
    (low, low_s), (high, high_s) = points[max(right, 1) - 1], points[max(right, 1)]
    return low_s + max(high_s - low_s, 0.0) * (count - low) / (high - low)


def _changed(points: Points, once_s: float, row_s: float) -> Points:
    """Returns points with seconds added, once and for each one counted."""
    return tuple((count, _sum(s, once_s + row_s * count)) for count, s in points)


def _sum(seconds: float, change_s: float) -> float:
    return max(seconds + change_s, _LEAST_SHARE * seconds)


def _points(value: object) -> Points:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(f"cost model: found {value!r}, expected pairs of a count and seconds")
    points = []
    for pair in value:
        if not isinstance(pair, Sequence) or len(pair) != 2 or not isinstance(pair[0], int):
            raise ConfigError(f"cost model: found {pair!r}, expected a count and seconds")
        points.append((pair[0], _seconds(pair[1])))
    counts = [count for count, _ in points]
    if counts != sorted(set(counts)) or min(counts, default=1) < 1:
        raise ConfigError(f"cost model: found counts {counts}, expected ascending counts from 1")
    return tuple(points)


def _count(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise ConfigError(f"cost model: found {value!r}, expected stored positions")
    return value


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or not value >= 0:
        raise ConfigError(f"cost model: found {value!r}, expected seconds")
    return float(value)
