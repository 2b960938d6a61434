"""`goodput`: decides the draft lengths of a whole batch together, by expected tokens per second.

Every request pays for the tokens of its draft by its share of the round's seconds, each with a
survival probability from a Thompson draw of its acceptance (`forecast`): it drafts while the
expected tokens are worth more than their price (`chain_rule`). The value of a second is the batch's
long-run rate (renewal reward, Dinkelbach's iteration), so that hard rounds stop sooner and easy
ones continue longer.

A draft may be empty, which is decided before the exit head runs. Exploration, which corrects a
belief that is too low, is capped at 0.5 % of tokens (`exploration`), so that traffic that is never
accepted stays as fast as plain decoding.
"""

from eesd_dist.control.goodput.controller import Goodput

__all__ = ["Goodput"]
