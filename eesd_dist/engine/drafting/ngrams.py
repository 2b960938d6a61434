"""Prompt lookup: what followed an earlier occurrence of a text's last tokens.

Texts repeat themselves and their prompts: names, quotations, code. The tokens after the earlier
occurrence are a draft that costs no model (prompt lookup decoding, Saxena 2023; in vLLM the n-gram
method). Every pair of tokens is kept with the place of the same pair before it, as LZ77 compressors
do, so that reading a token and finding its earlier occurrences take constant time. Independent of
tensors and requests.
"""

from collections.abc import Sequence
from typing import NamedTuple

from eesd_dist.types import TokenId

MOST_CONTEXT = 12
"""Tokens that are compared before an occurrence; two are always equal."""
_CANDIDATES = 8
"""Earlier occurrences of the last pair that are compared, the latest first."""
_READ_AT_ONCE = 2048
"""Tokens read at a time: about half a millisecond. A longer prompt is read over several rounds."""
_NOWHERE = -1


class Match(NamedTuple):
    """An earlier occurrence of the text's last tokens."""

    context: int
    """Number of tokens before it that agree, 2 to MOST_CONTEXT."""
    tokens: list[TokenId]
    """Tokens that followed it."""

    def up_to(self, count: int) -> "Match":
        """Returns the same with `count` tokens at most."""
        return Match(self.context, self.tokens[:count])


class NgramIndex:
    """The pairs of one text, which only grows."""

    def __init__(self) -> None:
        self._last: dict[tuple[TokenId, TokenId], int] = {}
        """The latest place of each pair: that of its second token."""
        self._before: list[int] = [_NOWHERE]
        """Place of the same pair before each place."""

    def match(self, tokens: Sequence[TokenId], limit: int) -> Match | None:
        """Returns the occurrence with the longest context, of equal ones the latest, and at most
        `limit` tokens after it; None if there is none, or the text is not read to its end yet.

        `tokens`: the text; that of the last call, and more.
        """
        before, last = self._before, self._last
        for position in range(len(before), min(len(tokens), len(before) + _READ_AT_ONCE)):
            pair = tokens[position - 1], tokens[position]
            before.append(last.get(pair, _NOWHERE))
            last[pair] = position
        if len(before) != len(tokens) or limit < 1:
            return None
        best, best_context, position = _NOWHERE, 0, before[-1]
        for _ in range(_CANDIDATES):
            if position == _NOWHERE or best_context == MOST_CONTEXT:
                break
            context = self._context(tokens, position)
            if context > best_context:
                best, best_context = position, context
            position = before[position]
        if best == _NOWHERE:
            return None
        return Match(best_context, _following(tokens, best + 1, limit))

    def _context(self, tokens: Sequence[TokenId], position: int) -> int:
        """Returns how many tokens up to `position` equal the last ones of the text."""
        end, context = len(tokens) - 1, 2
        limit = min(MOST_CONTEXT, position + 1)
        while context < limit and tokens[position - context] == tokens[end - context]:
            context += 1
        return context


def _following(tokens: Sequence[TokenId], first: int, limit: int) -> list[TokenId]:
    """Returns the tokens from a place on; at the end of the text they begin again, since there a
    text that repeats itself goes on so."""
    following = list(tokens[first : first + limit])
    period = len(tokens) - first
    while len(following) < limit:
        following.append(following[-period])
    return following
