"""Exploration budgets, as a share of all tokens.

Looking (computing a guess) and drafting have separate budgets, so that looking, which is cheaper,
does not use up the budget of drafting, which is more informative: with one budget a text that
became easy was not detected for more than a thousand rounds.
"""

_DRAFTING_SHARE, _LOOKING_SHARE = 0.0015, 0.0035
"""Shares of all tokens."""
_PRICE_MEMORY = 0.99
"""Discount per round of the highest probe price, the limit of a budget: rounds differ in size."""
_PROFIT_MEMORY = 0.98


class Exploration:
    """Budgets of one batch, in tokens."""

    def __init__(self) -> None:
        self.drafting = 0.0
        """Budget for probes and optimistic draws."""
        self._looking = 0.0
        self._ceiling = 0.0
        self._look_profit = 0.0
        """Mean profit, in tokens, of looks at levels that are not expected to pay."""

    def earn(self, *, num_requests: int, probe_price: float) -> None:
        """Adds a round's share to the budgets, up to the highest probe price of recent rounds."""
        self._ceiling = ceiling = max(probe_price, _PRICE_MEMORY * self._ceiling, 0.01)
        self.drafting = min(self.drafting + _DRAFTING_SHARE * num_requests, ceiling)
        self._looking = min(self._looking + _LOOKING_SHARE * num_requests, ceiling)

    def may_look(self, price: float) -> bool:
        """Returns whether to look: always if looks have been profitable, else if the budget has
        `price`."""
        return self._look_profit >= 0.0 or self._looking >= price

    def looked(self, profit: float, *, price: float) -> None:
        """Pays for one look, and learns what it has gained."""
        if self._look_profit < 0.0:
            self._looking -= price
        self._look_profit += (1.0 - _PROFIT_MEMORY) * (profit - self._look_profit)
