"""`goodput` with costs that it learns, on a device with round times like those of a GPU.

Figures of an H200 with a model of 8B (torch 2.11, Triton 3.6), in milliseconds: rounds without
drafts and with drafts of 1, 2 and 4 tokens for every request. The profile has what loops of single
parts took.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from random import Random

import pytest

from eesd_dist.config import SpeculationConfig
from eesd_dist.control.belief import Belief
from eesd_dist.control.calibrator import UNFITTED
from eesd_dist.control.chain_rule import follow
from eesd_dist.control.cost import CostModel, interpolated
from eesd_dist.control.learnt_cost import RoundCost
from eesd_dist.control.policy import DraftPolicy
from eesd_dist.types import Evidence, Outcome, RequestId

ROUNDS_MS = {
    1: ((0, 5.1), (1, 6.5), (2, 7.2), (4, 8.1)),
    8: ((0, 5.8), (1, 8.0), (2, 8.7), (4, 9.4)),
    32: ((0, 7.8), (1, 10.7), (2, 13.1), (4, 18.0)),
    64: ((0, 9.8), (1, 15.0), (2, 19.3), (4, 24.7)),
}
"""By batch size: a round by the mean length of its drafts."""
VERIFY_MS = ((1, 4.4), (8, 4.6), (64, 5.8), (128, 6.7), (192, 9.4), (320, 11.9))
"""A verify pass by its rows, a part of the round."""
PROFILE = CostModel(
    draft_step_s=0.705e-3,
    verify_s=(4.64e-3,) * 4 + (4.72e-3,) * 4 + (4.77e-3,),
    round_s=0.645e-3,
    guess_s=0.52e-3,
    verify_rows_s=((18, 5.19e-3), (36, 5.21e-3), (144, 8.84e-3), (576, 20.58e-3)),
    draft_rows_s=((2, 0.713e-3), (4, 0.769e-3), (16, 0.89e-3), (64, 1.352e-3)),
    known_rows_s=((2, 0.705e-3), (4, 0.792e-3), (16, 1.306e-3), (64, 3.796e-3)),
)
NUM_ROUNDS, LONGEST = 128, 8
BATCHES, ACCEPTANCES = (1, 8, 32, 64), (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(slots=True)
class Run:
    tokens: int = 0
    seconds: float = 0.0
    lengths: list[int] = field(default_factory=list)
    """Longest draft of each round."""

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass(slots=True)
class Device:
    """Rounds of one batch size and acceptance; equal seeds have equal texts and noise."""

    batch: int
    theta: float
    rng: Random

    def gap(self) -> float:
        """Returns the score gap of a guess, which says nothing about it."""
        return self.rng.expovariate(1.0)

    def seconds(self, guesses: list[int], drafted: list[int]) -> tuple[float, float]:
        """Returns verifying and the rest. `guesses`, `drafted`: by depth; a level takes most of its
        time whatever the number of its guesses."""
        batch, noise = self.batch, self.rng.lognormvariate(0.0, 0.02)
        num_levels = sum(max(count / batch, 0.7) for count in guesses)
        round_ms = _between(ROUNDS_MS[batch], num_levels)
        verify_ms = interpolated(VERIFY_MS, batch + sum(drafted))
        full_verify_ms = _between(VERIFY_MS, batch * (1 + num_levels))
        return noise * verify_ms * 1e-3, noise * (round_ms - full_verify_ms) * 1e-3


def _between(points: tuple[tuple[int, float], ...], count: float) -> float:
    low, high = interpolated(points, int(count)), interpolated(points, int(count) + 1)
    return low + (high - low) * (count - int(count))


def runs(batch: int, theta: float, *, length: int | None = None, seed: int = 1) -> Iterator[Run]:
    """Yields the runs of a policy, cold at first, with requests that are new in each. `length`: a
    fixed one instead of `goodput`."""
    speculation = SpeculationConfig(
        controller="goodput" if length is None else "fixed",
        max_draft_tokens=LONGEST,
        fixed_length=length or 0,
    )
    policy = DraftPolicy(
        speculation=speculation,
        cost=PROFILE,
        calibrator=UNFITTED,
    )
    device, number = Device(batch, theta, Random(f"{seed}/{batch}/{theta}")), 0
    while True:
        names = [RequestId(f"{number}/{i}") for i in range(batch)]
        number += 1
        for name in names:
            policy.admit(name, None, Belief())
        run = Run()
        for _ in range(NUM_ROUNDS):
            _round(policy, device, names, run)
        for name in names:
            policy.end(name)
        yield run


def _round(policy: DraftPolicy, device: Device, names: list[RequestId], run: Run) -> None:
    active = policy.begin_round(names)
    rules = policy.chain_rules({name: 0.0 for name in names if name in active})
    gaps = {name: [device.gap() for _ in range(LONGEST)] for name in rules}
    reports = {name: follow(rule, gaps[name]) for name, rule in rules.items()}
    policy.report(reports)
    lengths = [report.num_drafted for report in reports.values()]
    guesses = _by_depth([len(report.means) for report in reports.values()])
    drafted = _by_depth(lengths)
    outcomes = [
        _judged(name, gaps[name][: reports[name].num_drafted] if name in rules else [], device)
        for name in names
    ]
    policy.observe(outcomes)
    verify_s, other_s = device.seconds(guesses, drafted)
    policy.observe_cost(
        RoundCost(
            levels=drafted,
            guesses=guesses,
            num_rows=len(names) + sum(drafted),
            num_requests=len(names),
            verify_s=verify_s,
            other_s=other_s,
        )
    )
    run.seconds += verify_s + other_s
    run.tokens += len(names) + sum(outcome.num_accepted for outcome in outcomes)
    run.lengths.append(max(lengths, default=0))


def _by_depth(counts: list[int]) -> list[int]:
    return [sum(count > depth for count in counts) for depth in range(max(counts, default=0))]


def _judged(name: RequestId, gaps: list[float], device: Device) -> Outcome:
    accepted = 0
    while accepted < len(gaps) and device.rng.random() < device.theta:
        accepted += 1
    return Outcome(
        request_id=name,
        num_drafted=len(gaps),
        num_accepted=accepted,
        evidence=tuple(Evidence(depth=d, temperature=0.0, gap=gap) for d, gap in enumerate(gaps)),
    )


def rate(batch: int, theta: float, *, length: int | None = None, warm: bool = False) -> float:
    """Returns tokens per second over runs of several seeds, so many that chance says little."""
    tokens, seconds = 0, 0.0
    for seed in range(max(16 // batch, 1)):
        served = runs(batch, theta, length=length, seed=seed)
        run = next(served)
        if warm:
            run = next(served)
        tokens, seconds = tokens + run.tokens, seconds + run.seconds
    return tokens / seconds


@cache
def fixed_rates(batch: int, theta: float) -> Mapping[int, float]:
    return {length: rate(batch, theta, length=length) for length in (0, 1, 2, 4, 8)}


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("theta", ACCEPTANCES)
def test_it_is_never_slower_than_plain_decoding_and_near_the_best_length(
    batch: int, theta: float, *, warm: bool
) -> None:
    rates, served = fixed_rates(batch, theta), rate(batch, theta, warm=warm)
    # A few requests alone learn their acceptance from few tokens in the first rounds.
    few_tokens = batch <= 8 and not warm
    min_plain, min_best = (0.94, 0.9) if few_tokens else (0.98, 0.95)
    assert served >= min_plain * rates[0]
    assert served >= min_best * max(rates.values())
