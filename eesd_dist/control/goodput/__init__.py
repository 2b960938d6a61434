"""`goodput`: draft lengths of a whole batch at once, by expected tokens per second.

At each level every request has a possible next token (of a tree: several), and each of these a
chance to survive, by a Thompson draw of what its request's acceptance may be (`forecast`). All
compete for the same rows: they are taken in order of survival while the expected tokens are worth
more than their seconds cost (`allocation`). What a second is worth is the batch's long-run rate
(renewal reward, Dinkelbach's iteration), so that hard rounds stop sooner and easy ones go on
longer.

Drafting nothing is chosen freely, and before the exit head has done any work. Exploration, which
keeps an unlucky belief from lasting for ever, is capped at 0.5 % of tokens (`exploration`), so that
hopeless traffic stays as fast as plain decoding.
"""

from eesd_dist.control.goodput.controller import Goodput

__all__ = ["Goodput"]
