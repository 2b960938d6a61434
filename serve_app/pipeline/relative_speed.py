"""The speed of a pipeline relative to the others of its service.

In plain rounds of one request a second, as its engine measured them before its first request. It is
not configured, since all replicas of a deployment have the same configuration. It is not tokens a
second either: these say how busy a pipeline is rather than how fast, and load balancing by them
would give an idle pipeline fewer and fewer requests. It depends on the machines and the links
alone, and changes when an epoch starts on others.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from eesd_dist.control.cost import CostModel
from eesd_dist.errors import EesdError

logger = logging.getLogger(__name__)


class SpeedOf:
    """The speed of one pipeline, asked for once in each epoch."""

    def __init__(self, ask_drafter: Callable[[str], Awaitable[Any]]) -> None:
        self._ask_drafter = ask_drafter
        self._epoch: int | None = None
        """The epoch it was measured in."""
        self.cost: CostModel | None = None
        """None before it is known, and without an exit head, when nothing is measured."""

    @property
    def value(self) -> float | None:
        """Plain rounds a second: the fixed cost of a round, and one row verified."""
        return None if self.cost is None else 1.0 / (self.cost.round_s + self.cost.verify_s[0])

    async def ask(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        self._epoch = epoch  # asked once: heartbeats wait for the answer
        try:
            control = await self._ask_drafter("control")
        except EesdError as error:
            logger.debug("speed unknown: error=%s", error)
            return
        self.cost = None if control.cost is None else CostModel.from_json(control.cost)
