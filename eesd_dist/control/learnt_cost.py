"""Costs as the rounds of this process show them, with the start-up profile as the prior.

A profile is measured in seconds on an idle machine: one noisy sample, with everything in the
processor's caches. A round's own statistics correct it for as long as the process lives. Drafting
and verifying are each a line over the profile's figure, seconds = ratio * profile + extra, tracked
by a Kalman filter with a drifting state (a random walk); a time far from the forecast counts as one
at the edge, so that a disturbance moves little and is forgotten. Independent of clocks and
requests.

Batches of other sizes and contexts have lines of their own: what drafting adds to a round of 64
requests says little about a round of 8. At a new context they start from those of the nearest one.
The part of a round that does not draft is learnt from rounds without drafts alone: rounds that all
draft do not tell how long a plain one takes, and if that is taken for long, drafts look cheap.
`wants_plain` asks for such rounds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from eesd_dist.control.cost import CostModel

_RATIO_STD = 0.6
_EXTRA_STD = 0.3
"""Standard deviations of the prior, the second one as a share of a round without drafts."""
_DRIFT_ROUNDS = 200
"""Number of measured rounds without news after which the prior's uncertainty is reached again."""
_NOISE = 0.15
"""Standard deviation of a round's time, as a share of the forecast."""
_EDGE = 2.0
"""Standard deviations beyond which a time says no more."""
_FEW_ROUNDS, _ONE_IN = 64, 4
"""Number of rounds, plain or drafted, after which only some are learnt from: one in four."""
_NEIGHBOURS = 1.3
"""Batches of sizes that differ by less than this factor have the same lines."""
_SAME_CONTEXT = 0.1
"""Contexts have the same lines if a plain round takes as long within this share."""
_LEAST_REACH = 32
_MAX_SIZES = 256
_FIRST_PLAIN, _PLAIN_EVERY = (2, 6, 14), 200
"""Number of drafted rounds after which a plain one is wanted: at first, and later."""
_PATIENCE = 32
"""Rounds after which the price of drafts is learnt even if no round was plain."""
_CHANGE = 0.03
"""Relative change of a usual round's time that makes a new model worth its making."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCost:
    """Costs of a finished round."""

    levels: Sequence[int]
    """Tokens drafted at each depth, over all requests."""
    guesses: Sequence[int]
    """Tokens guessed at each depth, drafted or not."""
    num_lookups: int = 0
    """Drafts found by prompt lookup; their tokens are among those of `levels`, for less."""
    num_rows: int
    num_requests: int
    context: int | None = None
    """Mean number of stored positions of its requests; None: as in the round before."""
    verify_s: float
    other_s: float
    """The rest of the round: drafting, planning, transfer, commit."""


class Line:
    """seconds = ratio * profile + extra, as far as it is known."""

    def __init__(self, *, round_s: float) -> None:
        """`round_s`: a round without drafts, by the profile."""
        self.ratio, self.extra = 1.0, 0.0
        self._floor = round_s
        self._widest = (_RATIO_STD**2, (_EXTRA_STD * round_s) ** 2)
        self._var_ratio, self._var_extra = self._widest
        self._covariance = 0.0

    def restarted(self, *, round_s: float) -> "Line":
        """Returns the same line, as uncertain as a new one."""
        line = Line(round_s=round_s)
        line.ratio, line.extra = self.ratio, self.extra
        return line

    def at(self, profile_s: float) -> float:
        return self.ratio * profile_s + self.extra

    def observe(self, profile_s: float, seconds: float) -> None:
        """Updates with one measurement of what the profile forecasts as `profile_s`."""
        self._widen()
        forecast = self.at(profile_s)
        gain_ratio = self._var_ratio * profile_s + self._covariance
        gain_extra = self._covariance * profile_s + self._var_extra
        spread = gain_ratio * profile_s + gain_extra
        noise = (_NOISE * max(abs(forecast), 0.2 * self._floor)) ** 2
        edge = _EDGE * math.sqrt(noise + spread)
        off = min(max(seconds - forecast, -edge), edge) / (spread + noise)
        self.ratio = max(self.ratio + gain_ratio * off, 0.05)
        self.extra += gain_extra * off
        self._var_ratio -= gain_ratio * gain_ratio / (spread + noise)
        self._covariance -= gain_ratio * gain_extra / (spread + noise)
        self._var_extra -= gain_extra * gain_extra / (spread + noise)

    def _widen(self) -> None:
        """Increases the uncertainty, up to the prior's."""
        ratio, extra = self._widest
        self._var_ratio = min(self._var_ratio + ratio / _DRIFT_ROUNDS, ratio)
        self._var_extra = min(self._var_extra + extra / _DRIFT_ROUNDS, extra)
        bound = 0.99 * math.sqrt(self._var_ratio * self._var_extra)
        self._covariance = min(max(self._covariance, -bound), bound)


class LearntCost:
    """The cost model of one engine, for batches of the size and context of the latest round."""

    def __init__(self, profile: CostModel) -> None:
        self.profile = profile
        self._sizes: dict[tuple[int, int], _SizeCost] = {}
        """The costs by number of requests and context, the latest last."""
        self._size = _SizeCost(profile, 1)

    @property
    def model(self) -> CostModel:
        """The costs as learnt, renewed when a round's time has changed noticeably."""
        return self._size.model

    def observe(self, cost: RoundCost) -> None:
        """Learns from a round without prefill."""
        self.select(cost.num_requests, cost.context)
        if self._size.is_new:
            if len(self._sizes) >= _MAX_SIZES:
                self._sizes.pop(next(iter(self._sizes)))
            self._sizes[cost.num_requests, self._size.context] = self._size
        if cost.num_lookups:
            self._size.observe_lookups(cost)
        else:
            self._size.observe(cost)

    def select(self, num_requests: int, context: int | None) -> CostModel:
        """Returns the model for rounds of this size; `context` as in `RoundCost`, None for that of
        the round before."""
        context = self._size.context if context is None else context
        if not self._size.fits(num_requests, context):
            self._size = self._size_of(num_requests, context)
        return self.model

    @property
    def wants_plain(self) -> bool:
        """True if a round without drafts is due, for what it tells about their price."""
        return self._size.wants_plain

    def _size_of(self, num_requests: int, context: int) -> "_SizeCost":
        """Returns the lines of such rounds, or new ones, which are kept once they have learnt."""
        for key, size in reversed(self._sizes.items()):
            if size.fits(num_requests, context):
                self._sizes[key] = self._sizes.pop(key)  # used last
                return size
        size = _SizeCost(self.profile.at(context), num_requests)
        similar = [other for other in self._sizes.values() if other.has_size(num_requests)]
        if similar:
            size.start_from(min(similar, key=lambda other: abs(other.context - context)))
        return size


class _SizeCost:
    """The costs of batches of about one size and context."""

    def __init__(self, profile: CostModel, num_requests: int) -> None:
        self._profile, self._num_requests = profile, num_requests
        self.context = profile.context
        lengths = [0] * num_requests
        self._plain_s = plain_s = profile.batch_seconds(lengths)
        more_s = profile.at(self.context + 1000).batch_seconds(lengths) - plain_s
        reach = _SAME_CONTEXT * plain_s / more_s * 1000 if more_s > 0.0 else math.inf
        self._reach = max(reach, _LEAST_REACH)
        """Difference of contexts that have the same lines."""
        self._input = Line(round_s=plain_s)
        """The rest of a round, as the extra of a line."""
        self._drafting = Line(round_s=plain_s)
        """The seconds of drafting; the extra is its start."""
        self._verifying = Line(round_s=plain_s)
        self._lookups = Line(round_s=plain_s)
        """Additional seconds of a lookup, as the extra of a line."""
        self._num_rounds = self._num_plain = self._num_drafted = 0
        self._num_since_plain = 0
        """Drafted rounds since the latest plain one."""
        self.model = profile

    def start_from(self, other: "_SizeCost") -> None:
        """Takes over the lines of another context, and most of its plain rounds."""
        self._input, self._drafting, self._verifying, self._lookups = (
            line.restarted(round_s=self._plain_s)
            for line in (other._input, other._drafting, other._verifying, other._lookups)
        )
        self._num_plain = min(other._num_plain, len(_FIRST_PLAIN) - 1)
        self.model = self._learnt()

    @property
    def is_new(self) -> bool:
        """True until its first round."""
        return not self._num_rounds

    def has_size(self, num_requests: int) -> bool:
        low, high = sorted((self._num_requests, num_requests))
        return high < _NEIGHBOURS * low or low == high

    def fits(self, num_requests: int, context: int) -> bool:
        return self.has_size(num_requests) and abs(context - self.context) <= self._reach

    @property
    def wants_plain(self) -> bool:
        few = self._num_plain < len(_FIRST_PLAIN)
        return self._num_since_plain >= (_FIRST_PLAIN[self._num_plain] if few else _PLAIN_EVERY)

    def observe(self, cost: RoundCost) -> None:
        is_plain = not any(cost.guesses)
        self._num_rounds += 1
        self._num_plain += is_plain
        self._num_drafted += not is_plain
        self._num_since_plain = 0 if is_plain else self._num_since_plain + 1
        number = self._num_plain if is_plain else self._num_drafted
        if number > _FEW_ROUNDS and number % _ONE_IN:
            return
        profile = self._profile
        levels_s = _drafting_s(profile, cost)
        input_s = profile.known_batch(cost.num_requests)
        if is_plain:
            self._input.observe(0.0, cost.other_s - input_s)
        elif self._num_plain or self._num_drafted > _PATIENCE:
            self._drafting.observe(levels_s, cost.other_s - input_s - self._input.extra)
        self._verifying.observe(
            profile.verify_batch(cost.num_rows, cost.num_requests), cost.verify_s
        )
        if not all(self._is_as_before(length) for length in (0, 4)):
            self.model = self._learnt()

    def observe_lookups(self, cost: RoundCost) -> None:
        """Learns from a round with lookups and no other draft what each took in addition."""
        self._num_rounds += 1
        if any(cost.guesses) or not self._num_plain:
            return
        profile = self._profile
        expected_s = profile.known_batch(cost.num_requests) + self._input.extra
        self._lookups.observe(0.0, (cost.other_s - expected_s) / cost.num_lookups)
        if abs(max(self._lookups.extra, 0.0) - self.model.lookup_s) > _CHANGE * self._plain_s:
            self.model = self._learnt()

    def _is_as_before(self, length: int) -> bool:
        profile, count = self._profile, self._num_requests
        before = self.model.batch_seconds([length] * count)
        after = max(profile.known_batch(count) + self._input.extra, 0.0)
        if length:
            drafting = self._drafting
            after += drafting.ratio * length * profile.draft_batch(count) + max(drafting.extra, 0.0)
        after += self._verifying.at(profile.verify_batch(count * (1 + length), count))
        return abs(after - before) <= _CHANGE * before

    def _learnt(self) -> CostModel:
        profile, drafting, verifying = self._profile, self._drafting, self._verifying
        extra = self._input.extra
        return replace(
            profile,
            draft_step_s=drafting.ratio * profile.draft_step_s,
            guess_s=drafting.ratio * profile.guess_s,
            draft_rows_s=_scaled(profile.draft_rows_s, drafting.ratio, 0.0),
            start_s=max(drafting.extra, 0.0),
            lookup_s=max(self._lookups.extra, 0.0),
            round_s=max(profile.round_s + extra, 0.0),
            known_rows_s=_scaled(profile.known_rows_s, 1.0, extra),
            verify_s=tuple(max(verifying.at(seconds), 1e-9) for seconds in profile.verify_s),
            request_s=verifying.ratio * profile.request_s,
            verify_rows_s=_scaled(profile.verify_rows_s, verifying.ratio, verifying.extra),
            context_s=verifying.ratio * profile.context_s,
            row_context_s=verifying.ratio * profile.row_context_s,
            draft_context_s=drafting.ratio * profile.draft_context_s,
        )


def _drafting_s(profile: CostModel, cost: RoundCost) -> float:
    """Returns what the levels of a round take: a guess that is not drafted costs, too, and would
    make rounds without drafts look slow."""
    guessing_s = sum(map(profile.guess_batch, cost.guesses))
    return guessing_s + sum(
        profile.draft_batch(count) - profile.guess_batch(count) for count in cost.levels
    )


def _scaled(
    points: Sequence[tuple[int, float]], ratio: float, extra: float
) -> tuple[tuple[int, float], ...]:
    return tuple((count, max(ratio * seconds + extra, 0.0)) for count, seconds in points)
