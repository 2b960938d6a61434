"""Constraint of one live text: its masks, as far as they are there.

Depends on tokens alone, so that a row has the same mask with speculation on and off. Decides
neither when nor where a mask is made: see `masks`.
"""

from collections.abc import Sequence
from typing import Protocol

from eesd_dist.text.grammars import (
    TokenConstraint,
    TokenMatcher,
    common,
    digest_of,
    ends_of,
    is_allowed,
    lists_of,
)
from eesd_dist.types import Request


class MaskMaker(Protocol):
    """Maker of the masks of a draft."""

    def after_draft(
        self, text: "ConstrainedText", draft: Sequence[int], *, is_needed: bool
    ) -> bytes | None:
        """Returns the tokens that the grammar allows after the text and a draft; None: it is not
        worth the time in this round. Never None where it `is_needed`."""
        ...


class ConstrainedText:
    """Constraint of one request. Used by the round loop; `matcher` by a lane while a job runs."""

    def __init__(
        self, request: Request, matcher: TokenMatcher | None, maker: MaskMaker, *, vocab_size: int
    ) -> None:
        """`matcher`: at the start of the text; None: there is none yet, or no grammar."""
        sampling = request.sampling
        self.request_id = request.request_id
        self.caller = request.caller
        self.grammar = sampling.grammar
        self.digest = b"" if self.grammar is None else digest_of(self.grammar)
        self.ends = sampling.stop_token_ids
        self.tokens: list[int] = list(request.generated)
        self.matcher = matcher
        self.failure: str | None = None
        """Reason why the text cannot go on: any token is allowed then. None: it can."""
        self.spent_s = 0.0
        """Charged computing time of its masks."""
        self.is_asked = False
        """True while a lane makes the mask after the text."""
        self.is_new = True
        """True until a round has added to it."""
        self.drafts = True
        """False: nothing is drafted after it in this round."""
        self._maker = maker
        self._lists: Sequence[TokenConstraint] = lists_of(sampling, vocab_size=vocab_size)
        self._ends_mask = ends_of(sampling, vocab_size=vocab_size)
        self._any = b"\xff" * len(self._ends_mask)
        self._masks: dict[tuple[int, ...], bytes] = {}
        """Masks after the text and these drafts."""

    @property
    def is_ready(self) -> bool:
        """True if the mask after the text is there."""
        return () in self._masks

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the text; one that has ended needs no mask."""
        self.tokens += tokens
        self.is_new = False
        self._masks.clear()

    def put(self, mask: bytes | None) -> None:
        """Stores the tokens that the grammar allows after the text; None: any."""
        self._masks[()] = self._joined(mask, ())

    def fail(self, reason: str) -> None:
        self.failure = reason
        self.put(None)

    def mask_after(self, draft: Sequence[int]) -> bytes:
        """Returns the tokens that may follow the text and a draft."""
        mask = self._mask_after(tuple(draft), is_needed=True)
        assert mask is not None
        return mask

    def affords(self, draft: Sequence[int]) -> bool:
        """Makes the mask after a draft, if there is time for it in this round; returns whether it
        is there."""
        return self._mask_after(tuple(draft), is_needed=False) is not None

    def num_allowed(self, draft: Sequence[int]) -> int:
        """Returns how many tokens of a draft the text may go on with, as far as there is time for
        their masks."""
        for count, token in enumerate(draft):
            if not is_allowed(self.mask_after(draft[:count]), token):
                return count
            if not self.affords(draft[: count + 1]):
                return count
        return len(draft)

    def _mask_after(self, draft: tuple[int, ...], *, is_needed: bool) -> bytes | None:
        mask = self._masks.get(draft)
        if mask is None:
            allowed = None
            if self.grammar is not None and self.failure is None:
                allowed = self._maker.after_draft(self, draft, is_needed=is_needed)
                if allowed is None:
                    return None
            mask = self._joined(allowed, draft)
            self._masks[draft] = mask
        return mask

    def _joined(self, allowed: bytes | None, draft: tuple[int, ...]) -> bytes:
        masks = [] if allowed is None else [allowed]
        for token_list in self._lists:
            token_list.read(self.tokens)
            masks.append(token_list.mask_after(draft))
        return common(masks, ends=self._ends_mask) if masks else self._any
