"""The verify channel of a process that has draft rank 0 and verify rank 0."""

import logging
import time

from torch import Tensor

from eesd_dist.engine.verify import Observe, VerifyStage, verify_on_ranks
from eesd_dist.errors import PeerLost
from eesd_dist.transport.channel import share_close
from eesd_dist.transport.contracts import RoundHeader, VerifyReply
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.memory import MemoryChannel

logger = logging.getLogger(__name__)


class SharedVerifyChannel(MemoryChannel):
    """The channel to a verify rank 0 in this process, which shares each round with the others."""

    def __init__(self, stage: VerifyStage, group: ProcessGroup | None, *, observe: Observe) -> None:
        """`group` has the other verify ranks; None without any."""
        super().__init__(self._verify_observed, peer="verify rank 0 in this process")
        self._stage = stage
        self._group = group
        self._observe = observe

    def close(self) -> None:
        """Ends the loops of the other verify ranks. Closing twice changes nothing."""
        super().close()
        group, self._group = self._group, None
        if group is None or group.is_aborted:
            return
        try:
            share_close(group)
        except PeerLost as error:
            logger.info("peer gone before the channel was closed: %s", error)
            group.abort("the channel was closed")

    def _verify_observed(
        self, header: RoundHeader, hidden_TD: Tensor, draft_probs_KV: Tensor | None
    ) -> VerifyReply:
        began_unix_s = time.time()
        reply = verify_on_ranks(self._stage, self._group, header, hidden_TD, draft_probs_KV)
        self._observe(header, began_unix_s, time.time())
        return reply
