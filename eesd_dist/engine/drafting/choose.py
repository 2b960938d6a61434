"""Chooses what drafts for a request: one call for a whole chain, or level by level, and says why.

The call (`backends.api.ChainDrafter`) is compiled on a CPU and made of graphs on a GPU. It guesses
by scores, by rules that controllers state in advance. All other requests are drafted level by
level, and do not slow these.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from eesd_dist.backends.api import ChainDrafter
from eesd_dist.control.chain_rule import ChainRule
from eesd_dist.control.policy import DraftPolicy
from eesd_dist.engine.drafting.guesses import chooses_plainly, noise_of
from eesd_dist.engine.drafting.run import DraftRun
from eesd_dist.types import RequestId

LevelReason = Literal[
    "evidence", "rejection", "no_call", "tree", "features", "grammar", "sampling", "controller"
]
"""Reasons for drafting level by level: evidence is logged; rejection sampling; no call for this
stage (ranks on several hosts, no kernels, or they are still being compiled); a tree; features are
returned; a grammar; narrow filters, where the call has none; the controller decides on every
token."""


def choose_drafters(
    runs: Sequence[DraftRun],
    policy: DraftPolicy,
    *,
    drafter: ChainDrafter | None,
    no_call: LevelReason | None,
) -> tuple[Mapping[RequestId, ChainRule], Mapping[RequestId, LevelReason]]:
    """Returns the rules of the requests that one call drafts, and why the others are drafted level
    by level. `runs`: those that draft in this round; `drafter`: the call, or `no_call`: the reason
    where this stage has none."""
    reasons: dict[RequestId, LevelReason] = {}
    for run in runs:
        if (reason := no_call or _own_reason(run, drafter)) is not None:
            reasons[run.request_id] = reason
    rules = policy.chain_rules(
        {run.request_id: noise_of(run) for run in runs if run.request_id not in reasons}
    )
    for run in runs:
        if run.request_id not in rules:
            reasons.setdefault(run.request_id, "controller")
    return rules, reasons


def fits_one_call(run: DraftRun) -> bool:
    """Returns whether a call can run rows of this request, and draft a chain after them."""
    return not run.is_tree and not run.item.live.request.features


def _own_reason(run: DraftRun, drafter: ChainDrafter | None) -> LevelReason | None:
    assert drafter is not None, "a stage with a call"
    if run.is_tree:
        return "tree"
    if run.item.live.request.features:
        return "features"
    if run.constraint is not None:  # it reads each token before the next one is guessed
        return "grammar"
    return None if chooses_plainly(run, drafter) else "sampling"
