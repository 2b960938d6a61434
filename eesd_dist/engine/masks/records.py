"""Costs of the masks of each grammar, recorded so that costly ones are made in threads.

Depends on times alone. One thread.
"""

from collections import OrderedDict
from dataclasses import dataclass

CHEAP_S = 0.001
"""A mask below this is made in the round loop."""
_PROVEN_AFTER = 32
_MOST_NEEDED = 1 << 16
_NUM_GRAMMARS = 4096


@dataclass(slots=True)
class _Record:
    streak: int = 0
    """Cheap masks since the last costly one."""
    needed: int = 0
    """Cheap masks after which it is no longer slow; doubled each time."""


class GrammarRecords:
    """The latest grammars, by their digests."""

    def __init__(self) -> None:
        self._records: OrderedDict[bytes, _Record] = OrderedDict()

    def note(self, digest: bytes, seconds: float) -> None:
        """Takes what one mask has cost, with the tokens read for it."""
        record = self._records.setdefault(digest, _Record())
        self._records.move_to_end(digest)
        if seconds < CHEAP_S:
            record.streak += 1
        elif record.streak >= record.needed:  # it was not slow
            record.needed = min(max(_PROVEN_AFTER, 2 * record.needed), _MOST_NEEDED)
            record.streak = 0
        else:
            record.streak = 0
        while len(self._records) > _NUM_GRAMMARS:
            self._records.popitem(last=False)

    def is_slow(self, digest: bytes) -> bool:
        record = self._records.get(digest)
        return record is not None and record.streak < record.needed

    def is_proven(self, digest: bytes) -> bool:
        """Returns whether many masks in a row were cheap."""
        record = self._records.get(digest)
        return record is not None and record.streak >= max(_PROVEN_AFTER, record.needed)
