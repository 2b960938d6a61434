"""Computing time of masks: what a request and its caller may take beyond what is usual, and which
grammars have costly masks, so that those are made in threads.

Independent of grammars, threads and tensors. One thread charges and records; any may ask.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from eesd_dist.config import GrammarConfig
from eesd_dist.errors import CapacityError
from eesd_dist.types import Value

FREE_S = 0.002
"""Time that one mask, or reading one round's tokens, may take at no charge."""
_OWN_S = 0.1
"""Time that a text may take although its caller is over its budget: others may have spent that."""
_FLAGGED_FOR_S = 600.0
_NUM_CALLERS = 1024


class _Account(Value, frozen=True, kw_only=True):
    debt_s: float
    at_s: float
    """Time of the last charge."""


class MaskBudget:
    """A token bucket for each caller, and a limit for each request."""

    def __init__(self, config: GrammarConfig, *, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._accounts: OrderedDict[str, _Account] = OrderedDict()
        """Callers charged at least once, the latest last."""

    def charge(self, caller: str, seconds: float) -> float:
        """Charges work of this length; returns the seconds that were not free."""
        beyond_s = seconds - FREE_S
        if beyond_s <= 0:
            return 0.0
        self._accounts[caller] = _Account(
            debt_s=self._debt_s(caller) + beyond_s, at_s=self._clock()
        )
        self._accounts.move_to_end(caller)
        while len(self._accounts) > _NUM_CALLERS:
            self._accounts.popitem(last=False)
        return beyond_s

    def is_flagged(self, caller: str) -> bool:
        """Returns whether a mask of this caller was late in the last ten minutes."""
        account = self._accounts.get(caller)
        return account is not None and self._clock() - account.at_s < _FLAGGED_FOR_S

    def excess(self, caller: str, *, spent_s: float) -> str | None:
        """Returns why a request that has spent so much must end; None: it may go on."""
        config = self._config
        if spent_s > config.request_budget_s:
            return (
                "the grammar needs more work than is allowed: its masks took "
                f"{spent_s:.1f} s beyond {FREE_S * 1e3:.0f} ms each, expected at most "
                f"{config.request_budget_s:g} s for one text; simplify the grammar: ambiguous "
                "rules cost most"
            )
        if spent_s > _OWN_S and self._debt_s(caller) > config.caller_budget_s:
            return (
                "the grammars of this caller need more work than is allowed: their masks took "
                f"more than {config.caller_budget_s:g} s beyond {FREE_S * 1e3:.0f} ms each; "
                "simplify them: ambiguous rules cost most"
            )
        return None

    def require_credit(self, caller: str) -> None:
        """Raises CapacityError for a caller over its budget."""
        over_s = self._debt_s(caller) - self._config.caller_budget_s
        if over_s <= 0:
            return
        error = CapacityError(
            "masks of this caller's grammars took more time than is allowed: try again later, or "
            "send a simpler grammar"
        )
        error.retry_after_s = over_s / self._config.caller_refill
        raise error

    def _debt_s(self, caller: str) -> float:
        account = self._accounts.get(caller)
        if account is None:
            return 0.0
        refilled_s = (self._clock() - account.at_s) * self._config.caller_refill
        return max(0.0, account.debt_s - refilled_s)


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
