"""`eesd bench filters`: filters on shards of a vocabulary against filters on whole, sorted rows.

Ranks are threads of one process: the exchanges are those of processes, and so are their bytes.

Shapes: R rows, V columns of a vocabulary.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise, product
from random import Random
from statistics import median

import torch
from torch import Tensor

from eesd_dist.bench.options import FiltersOptions
from eesd_dist.bench.output import Say, print_report, say_unless
from eesd_dist.provenance import collect_provenance
from eesd_dist.sampling.elementary import mass_of
from eesd_dist.sampling.filters import filtered, most_traffic
from eesd_dist.sampling.row_rules import RowRule
from eesd_dist.sampling.rule import choose
from eesd_dist.transport.contracts import TensorGroup
from eesd_dist.transport.thread_group import ThreadGroup, on_ranks
from eesd_dist.types import SamplingParams

WIDE = 131_072
VOCABULARIES = {1_000: 0.72, 4_096: 0.24, 32_000: 0.03, WIDE: 0.01}
"""Share of the compared rows that each width has."""
DEGREES = (1, 2, 3, 5, 8)

_ROWS_AT_ONCE = 16
_ROWS_OF_A_ROUND = 64 * 5
"""64 requests with 4 drafted tokens."""

KINDS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sharp": lambda x: 8.0 * x,
    "flat": lambda x: 0.3 * x,
    "uniform": torch.zeros_like,
    "tied": lambda x: (2.0 * x).round(),
    "bfloat16": lambda x: (2.0 * x).bfloat16().float(),
    "masked": lambda x: (5.0 * x).masked_fill(x < 1.0, -torch.inf),
}
"""Rows of scores, made of normal numbers."""


@dataclass(slots=True)
class CountedGroup:
    """A rank's view of a group that counts its gathers."""

    group: TensorGroup
    num_exchanges: int = 0
    num_bytes: int = 0
    """Gathered, this rank's own part included."""

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(x)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        self.num_exchanges += 1
        self.num_bytes += x.nbytes * self.size
        return self.group.all_gather(x)

    def broadcast(self, x: Tensor, *, source: int = 0) -> Tensor:
        return self.group.broadcast(x, source=source)


@dataclass(frozen=True, slots=True)
class OnShards:
    """What the ranks keep of all columns, and what rank 0 gathered for it."""

    kept_RV: Tensor
    num_exchanges: int
    num_bytes: int


def filtered_on_shards(
    scores_RV: Tensor, rules: Sequence[RowRule], cuts: Sequence[int]
) -> OnShards:
    """Filters on one rank for each part between `cuts`, which begin with 0 and end with V."""
    shards = [scores_RV[:, start:stop] for start, stop in pairwise(cuts)]

    def on_rank(group: ThreadGroup) -> tuple[Tensor, CountedGroup]:
        torch.set_num_threads(1)
        counted = CountedGroup(group)
        return filtered(shards[group.rank], rules, group=counted), counted

    parts = on_ranks(len(shards), on_rank)
    kept_RV = torch.cat([kept for kept, _ in parts], dim=-1)
    return OnShards(kept_RV, parts[0][1].num_exchanges, parts[0][1].num_bytes)


def filtered_by_sorting(scores_RV: Tensor, rules: Sequence[RowRule]) -> Tensor:
    """Filters whole rows: sorts each, and keeps its tokens one after the other."""
    num_columns = scores_RV.shape[-1]
    ranked = scores_RV.sort(dim=-1, descending=True, stable=True)
    kept_RV = torch.full_like(scores_RV, -torch.inf)
    for row, rule in enumerate(rules):
        scores_V, ids_V = ranked.values[row], ranked.indices[row]
        size = num_columns
        if rule.top_k > 0:
            size = int((scores_V >= scores_V[min(rule.top_k, num_columns) - 1]).sum())
        if rule.top_p < 1.0:
            mass_V = mass_of(scores_V[:size] - scores_V[0]).cumsum(0)
            target = math.ceil(rule.top_p * float(mass_V[-1]))
            size = min(size, 1 + int((mass_V < target).sum()))
        if rule.min_p > 0.0:
            lowest = scores_V[0] + torch.tensor(math.log(rule.min_p))
            size = min(size, int((scores_V >= lowest).sum()))
        kept_RV[row, ids_V[:size]] = scores_V[:size]
    return kept_RV


def random_rule(rng: Random) -> RowRule:
    """Returns a rule with at least one filter."""
    rule = _rule(
        top_p=rng.choice([0.0, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 2**-30, 1 - 2**-53, 1.0]),
        top_k=rng.choice([0, 0, 0, 1, 5, 50, 128, 129, 700, 10**6]),
        min_p=rng.choice([0.0, 0.0, 0.02, 0.5, 1.0]),
    )
    return rule if rule.is_filtered else random_rule(rng)


def _rule(*, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> RowRule:
    params = SamplingParams(top_p=top_p, top_k=top_k, min_p=min_p)
    return RowRule.of(params, position=0, num_prompt=0)


@dataclass(slots=True)
class Comparison:
    """Rows on shards that were compared with whole rows."""

    rows_of: Counter[str] = field(default_factory=Counter)
    """Number of rows of each kind, width and degree."""
    num_different: int = 0
    num_tokens_kept: int = 0

    def add(self, found_RV: Tensor, expected_RV: Tensor, *names: str) -> None:
        num_rows = found_RV.shape[0]
        self.rows_of.update(dict.fromkeys(names, num_rows))
        self.num_different += int((found_RV != expected_RV).any(dim=-1).sum())
        self.num_tokens_kept += int((expected_RV > -torch.inf).sum())


def compare(num_rows: int, *, seed: int, say: Say) -> Comparison:
    """Compares rows of every kind, width and degree, with random filters and random shards."""
    rng, generator = Random(seed), torch.Generator().manual_seed(seed)
    comparison, kinds = Comparison(), cycle(product(KINDS, DEGREES))
    for width, share in VOCABULARIES.items():
        began_s = time.perf_counter()
        num_batches = math.ceil(num_rows * share / _ROWS_AT_ONCE)
        for kind, degree in (next(kinds) for _ in range(num_batches)):
            scores_RV = KINDS[kind](torch.randn(_ROWS_AT_ONCE, width, generator=generator))
            rules = [random_rule(rng) for _ in range(_ROWS_AT_ONCE)]
            inner = sorted(rng.randrange(width + 1) for _ in range(degree - 1))
            found_RV = filtered_on_shards(scores_RV, rules, [0, *inner, width]).kept_RV
            expected_RV = filtered_by_sorting(scores_RV, rules)
            names = (kind, f"{width} columns", f"{degree} ranks")
            comparison.add(found_RV, expected_RV, *names)
        took_s = time.perf_counter() - began_s
        count, differ = comparison.rows_of[f"{width} columns"], comparison.num_different
        say(f"{count} rows of {width}: {differ} differ so far ({took_s:.0f} s)")
    return comparison


def traffic_of_rounds(num_rows: int, *, say: Say) -> dict[str, object]:
    """Returns what one round of rows with top_p 0.95 gathers, for each kind of row."""
    rules = [_rule(top_p=0.95)] * num_rows
    normal_RV = torch.randn(num_rows, WIDE, generator=torch.Generator().manual_seed(5))
    rounds: dict[str, object] = {
        "rows": num_rows,
        "columns": WIDE,
        "joined_bytes": num_rows * WIDE * 4,
    }
    for degree in (2, 8):
        cuts = [rank * WIDE // degree for rank in range(degree + 1)]
        most = most_traffic(rules, num_ranks=degree)
        found = {"most": {"exchanges": most.num_exchanges, "bytes": most.num_bytes}}
        for kind in ("sharp", "uniform", "flat"):
            used = filtered_on_shards(KINDS[kind](normal_RV), rules, cuts)
            found[kind] = {"exchanges": used.num_exchanges, "bytes": used.num_bytes}
            say(f"{degree} ranks, {num_rows} {kind} rows: {found[kind]}")
        rounds[f"{degree} ranks"] = found
    return rounds


def times_us(*, num_rows: Sequence[int] = (1, 5, 64), say: Say) -> dict[str, float]:
    """Returns the median time of a choice from whole rows, in one rank, noise included."""
    found: dict[str, float] = {}
    settings = {
        "top_p 0.95": _rule(top_p=0.95),
        "top_k 50": _rule(top_k=50),
        "min_p 0.05": _rule(min_p=0.05),
        "top_k 50, top_p 0.95": _rule(top_k=50, top_p=0.95),
    }
    generator = torch.Generator().manual_seed(6)
    for width, count, kind in product((4_096, WIDE), num_rows, ("sharp", "flat", "uniform")):
        scores_RV = KINDS[kind](torch.randn(count, width, generator=generator))
        for name, rule in settings.items():
            label = f"{count} x {width} {kind}, {name}"
            found[label] = round(1e6 * _median_s(scores_RV, [rule] * count), 1)
            say(f"{label}: {found[label]:.0f} us")
    return found


def _median_s(scores_RV: Tensor, rules: Sequence[RowRule]) -> float:
    took: list[float] = []
    began_s = time.perf_counter()
    while len(took) < 5 or (len(took) < 100 and time.perf_counter() - began_s < 0.5):
        start_s = time.perf_counter()
        choose(scores_RV, rules)
        took.append(time.perf_counter() - start_s)
    return median(took)


@torch.inference_mode()
def main(options: FiltersOptions) -> int:
    say = say_unless(options.json)
    torch.set_num_threads(1)
    comparison = compare(options.rows, seed=options.seed, say=say)
    report: dict[str, object] = {
        "rows": sum(comparison.rows_of[kind] for kind in KINDS),
        "different": comparison.num_different,
        "tokens_kept": comparison.num_tokens_kept,
        "rows_of": dict(comparison.rows_of),
    }
    if not options.quick:
        report["round"] = traffic_of_rounds(_ROWS_OF_A_ROUND, say=say)
        report["times_us"] = times_us(say=say)
    report["provenance"] = collect_provenance(seed=options.seed).as_json()
    print_report(report)
    return 1 if comparison.num_different else 0
