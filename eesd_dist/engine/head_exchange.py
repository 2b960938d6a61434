"""Replaces the exit head of a running engine between two rounds."""

from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.policy import DraftPolicy
from eesd_dist.engine.drafting.stage import DraftStage
from eesd_dist.errors import ConfigError
from eesd_dist.model.heads.exit_head import ExitHead
from eesd_dist.schedule.scheduler import Scheduler


class HeadExchange:
    """Holds the next head until the loop is between two rounds. Used under the engine's lock."""

    def __init__(self, *, draft: DraftStage, policy: DraftPolicy, scheduler: Scheduler) -> None:
        self._draft = draft
        self._policy = policy
        self._scheduler = scheduler
        self._next: tuple[ExitHead, Calibrator] | None = None

    def check(self, head: ExitHead) -> None:
        """Raises ConfigError for a head with another exit layer."""
        current = self._draft.head
        if current is None or current.exit_layer != head.exit_layer:
            raise ConfigError(
                f"an exit head after layer {head.exit_layer} cannot replace this engine's head: "
                "build a new engine"
            )

    def offer(self, head: ExitHead, calibrator: Calibrator) -> None:
        self._next = (head, calibrator)

    def take(self) -> None:
        """Installs the offered head, if there is one; cached prefixes have to be read again."""
        waiting, self._next = self._next, None
        if waiting is None:
            return
        head, calibrator = waiting
        self._policy.recalibrate(calibrator)
        self._scheduler.change_drafter()
        self._draft.swap_head(head)  # last: it raises if a rank is lost
