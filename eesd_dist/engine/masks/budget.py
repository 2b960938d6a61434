"""Computing time of masks that a request and its caller may take beyond what is usual.

Independent of grammars, threads and tensors. One thread charges; any may ask.
"""

from collections import OrderedDict
from collections.abc import Callable

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
