"""Next action of a pipeline's supervisor: one table of states and actions.

    python -m serve_app.pipeline.lifecycle

prints the table that docs/failures.md has. `next_action` is a pure function of the pipeline's
state, wanted and observed: the first rule that holds decides.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class EpochKind(Enum):
    NONE = "no epoch"
    FULL = "a full epoch"
    DEGRADED = "a degraded epoch"


class Action(Enum):
    RELEASE = "release the workers and their placement groups"
    GIVE_UP = "release the workers; Serve starts another pipeline"
    END_EPOCH = "end the epoch: streams end as lost, workers leave, those that cannot are killed"
    RESET_HEAD = "replace the workers by new ones with the configured exit head"
    WAIT = "wait, longer after each failure"
    START_DEGRADED = "start an epoch of the verify ranks and the fallbacks in their processes"
    START_FULL = "fill the empty slots and start an epoch of all workers"
    RESTORE_DRAFT = "fill the draft stage's slots and load its weights, while fallbacks decode"
    FAIL_BACK = "end the degraded epoch between two rounds; streams are sent on"
    WATCH = "serve, and watch the workers"


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedState:
    """The state from which `next_action` decides."""

    is_deployed: bool = True
    """False once Serve takes the pipeline down."""
    is_hopeless: bool = False
    """It broke too often without progress, was not started in time, or its configuration is
    wrong."""
    epoch: EpochKind = EpochKind.NONE
    is_broken: bool = False
    """The epoch has lost a worker, or its loop has failed."""
    is_head_unloadable: bool = False
    """The promoted exit head cannot be loaded; the configured one can."""
    must_wait: bool = False
    """The last attempt failed a moment ago."""
    can_fall_back: bool = False
    """Fallbacks are configured and loaded, all verify ranks are there, the draft stage is not, and
    the last attempt at a degraded epoch did not fail."""
    is_draft_ready: bool = True
    """Every draft slot has a worker with loaded weights."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Row of the table."""

    when: str
    holds: Callable[[SupervisedState], bool]
    action: Action
    then: str
    """The state after the action succeeded, and after it failed."""


_NONE, _FULL, _DEGRADED = EpochKind.NONE, EpochKind.FULL, EpochKind.DEGRADED

RULES: tuple[Rule, ...] = (
    Rule(
        "Serve takes the pipeline down",
        lambda s: not s.is_deployed,
        Action.RELEASE,
        "over",
    ),
    Rule(
        "it broke too often without progress, was not started in time, or its configuration is "
        "wrong",
        lambda s: s.is_hopeless,
        Action.GIVE_UP,
        "over",
    ),
    Rule(
        "an epoch is broken",
        lambda s: s.epoch is not _NONE and s.is_broken,
        Action.END_EPOCH,
        "no epoch",
    ),
    Rule(
        "no epoch, and the promoted exit head cannot be loaded",
        lambda s: s.epoch is _NONE and s.is_head_unloadable,
        Action.RESET_HEAD,
        "no epoch",
    ),
    Rule(
        "no epoch, and the last attempt failed a moment ago",
        lambda s: s.epoch is _NONE and s.must_wait,
        Action.WAIT,
        "no epoch",
    ),
    Rule(
        "no epoch, the draft stage is missing, and there are fallbacks",
        lambda s: s.epoch is _NONE and s.can_fall_back,
        Action.START_DEGRADED,
        "a degraded epoch; failed: no epoch, and the next one is full",
    ),
    Rule(
        "no epoch",
        lambda s: s.epoch is _NONE,
        Action.START_FULL,
        "a full epoch; failed: no epoch, after a pause",
    ),
    Rule(
        "a degraded epoch, and the draft stage is missing or has no weights",
        lambda s: s.epoch is _DEGRADED and not s.is_draft_ready,
        Action.RESTORE_DRAFT,
        "the same with a draft stage; failed: the same, tried again after a pause",
    ),
    Rule(
        "a degraded epoch, and the draft stage is back",
        lambda s: s.epoch is _DEGRADED,
        Action.FAIL_BACK,
        "no epoch",
    ),
    Rule(
        "a full epoch",
        lambda s: s.epoch is _FULL,
        Action.WATCH,
        "a full epoch; a worker is lost: broken",
    ),
)


def next_action(state: SupervisedState) -> Action:
    """Returns the action of the first rule that holds."""
    return next(rule.action for rule in RULES if rule.holds(state))


def table() -> str:
    """Returns the rules as a Markdown table, in the order in which they are tried."""
    rows = ["| # | state | action | then |", "|---|---|---|---|"]
    rows += [
        f"| {number} | {rule.when} | `{rule.action.name}`: {rule.action.value} | {rule.then} |"
        for number, rule in enumerate(RULES, start=1)
    ]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
