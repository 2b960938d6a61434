"""How fast a pipeline is, beside the others of its service.

In plain rounds of one request a second, as its engine measured them before its first request. A
number in the configuration could not tell pipelines apart, since all replicas of a deployment have
the same one; tokens a second while it serves say how busy a pipeline is rather than how fast, and
routing by them would give ever less to whoever has little to do. This one depends on the machines
and the links alone, and changes when an epoch forms on others.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from eesd_dist.control.cost import CostModel
from eesd_dist.errors import EesdError

logger = logging.getLogger(__name__)


class SpeedOf:
    """One pipeline's, asked for once in each epoch."""

    def __init__(self, ask_drafter: Callable[[str], Awaitable[Any]]) -> None:
        self._ask_drafter = ask_drafter
        self._epoch: int | None = None
        """The one it was measured in."""
        self.value: float | None = None
        """None before it is known, and where nothing was measured: without an exit head."""

    async def ask(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        self._epoch = epoch  # asked once: heartbeats wait for the answer
        try:
            control = await self._ask_drafter("control")
        except EesdError as error:
            logger.debug("speed not known: error=%s", error)
            return
        self.value = speed_of(control.cost)


def speed_of(cost: Mapping[str, object] | None) -> float | None:
    """Plain rounds a second: one row verified, and what a round costs whatever its rows."""
    if cost is None:
        return None
    model = CostModel.from_json(cost)
    return 1.0 / (model.round_s + model.verify_s[0])
