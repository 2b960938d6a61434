"""Breakdown of a round's time: the loop's wall clock by stage.

The one round timer of all benchmarks. It reads what engines report about their rounds, in this
process or from a service's `/debug/rounds`, and starts no clock.
"""

import statistics
from collections.abc import Sequence

from eesd_dist.types import RoundStats

STAGES = ("plan", "draft", "transfer", "verify", "collectives", "commit", "other")
"""Their sum is the loop's wall clock."""


def split_of(stats: RoundStats) -> dict[str, float]:
    """Returns the seconds of each stage as the drafting loop sees them.

    `verify` and `collectives` are what the loop waited for; what was verified while it did
    something else is `hidden`. A wait for a verdict is transfer first, then what the verify ranks
    did.
    """
    transfer_s = min(stats.transfer_s, stats.waited_s)
    waited_s = stats.waited_s - transfer_s
    collective = min(stats.collective_s / stats.verify_s, 1.0) if stats.verify_s else 0.0
    draft_ranks_s = min(stats.draft_group.wait_s, stats.draft_s)
    return {
        "plan": stats.plan_s,
        "draft": stats.draft_s - draft_ranks_s,
        "transfer": transfer_s,
        "verify": waited_s * (1.0 - collective),
        "collectives": waited_s * collective + draft_ranks_s,
        "commit": stats.commit_s,
        "other": stats.other_s,
        "hidden": max(stats.verify_s - waited_s, 0.0),
    }


def round_s(stats: RoundStats) -> float:
    """Returns the loop's wall clock of a round: from one verdict to the next."""
    split = split_of(stats)
    return sum(split[stage] for stage in STAGES)


def ms_per_round(rounds: Sequence[RoundStats]) -> dict[str, float]:
    """Returns the median milliseconds of each stage; `overhead` is all but draft and verify."""
    if not rounds:
        return {}
    splits = [split_of(stats) for stats in rounds]
    overhead_s = [
        round_s(stats) - split["draft"] - split["verify"]
        for stats, split in zip(rounds, splits, strict=True)
    ]
    columns = {name: [split[name] for split in splits] for name in (*STAGES, "hidden")}
    columns["overhead"] = overhead_s
    return {name: round(1e3 * statistics.median(column), 3) for name, column in columns.items()}


def without_prefill(rounds: Sequence[RoundStats]) -> list[RoundStats]:
    """Returns the rounds without prefill."""
    return [stats for stats in rounds if stats.num_prefill_rows == 0]
