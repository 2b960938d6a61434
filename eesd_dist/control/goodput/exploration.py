"""Exploration budgets: what may be spent on finding out, as a share of all tokens.

Two ways of finding out have a budget each, so that looking, which is cheaper, never starves
drafting, which is surer: with one budget a text that became easy went unnoticed for more than a
thousand rounds.
"""

_DRAFTING_SHARE, _LOOKING_SHARE = 0.0015, 0.0035
"""Of all tokens."""
_PRICE_MEMORY = 0.99
"""Of the dearest probe that a budget may be saved for: rounds differ in size."""
_PROFIT_MEMORY = 0.98


class Exploration:
    """The budgets of one batch, in tokens."""

    def __init__(self) -> None:
        self.drafting = 0.0
        """For probes and optimistic draws."""
        self._looking = 0.0
        self._ceiling = 0.0
        self._look_profit = 0.0
        """Tokens a look at a level of doubtful worth has earned, beyond what it cost."""

    def earn(self, *, num_requests: int, probe_price: float) -> None:
        """A round begins. A budget never holds more than the dearest probe of late costs."""
        self._ceiling = ceiling = max(probe_price, _PRICE_MEMORY * self._ceiling, 0.01)
        self.drafting = min(self.drafting + _DRAFTING_SHARE * num_requests, ceiling)
        self._looking = min(self._looking + _LOOKING_SHARE * num_requests, ceiling)

    def pay_for_look(self, price: float) -> bool:
        """Whether to look: freely where looks have paid, else from their budget."""
        if self._look_profit < 0.0:
            if self._looking < price:
                return False
            self._looking -= price
        return True

    def looked(self, profit: float) -> None:
        self._look_profit += (1.0 - _PROFIT_MEMORY) * (profit - self._look_profit)
