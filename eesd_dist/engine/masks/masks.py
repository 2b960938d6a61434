"""Masks of the live requests, and where each is made.

A mask that costs little is made in the round loop. A grammar of which one was costly, and all of a
caller with such a grammar in the last ten minutes, are worked on in threads: their requests sit
rounds out until their masks are there, and nothing is drafted after them. What costly masks take is
charged to the request and to its caller; beyond the budget the request ends.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from eesd_dist.config import GrammarConfig
from eesd_dist.engine.masks.budget import CHEAP_S, GrammarRecords, MaskBudget
from eesd_dist.engine.masks.lane import MadeMask, MaskJob, MaskLane, MaskResult
from eesd_dist.engine.masks.text import ConstrainedText
from eesd_dist.errors import RequestError
from eesd_dist.text.grammars import GrammarCompiler, digest_of
from eesd_dist.types import Emission, Request, RequestId

logger = logging.getLogger(__name__)

_ROUND_S = 0.003
"""Time that masks may take in one turn of the round loop, in addition to those it needs."""
_WAIT_S = 0.001
"""Time that a turn waits for masks of the quick lane."""
_MOST_S = 60.0
"""Maximum time of one mask, waiting for processors included."""
_CHUNK = 8
"""Tokens that a text's matcher reads before the time is looked at."""


class Masks:
    """Owns the constrained texts of an engine, and two threads. `text_of` may be called from any
    thread, `admit` and `end` under the engine's lock, the rest from the round loop."""

    def __init__(
        self,
        *,
        grammars: GrammarCompiler | None,
        vocab_size: int,
        config: GrammarConfig | None = None,
        is_overdue: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`grammars`: None refuses requests with one. `is_overdue`: returns True for masks that
        take too long, for tests."""
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._is_overdue = is_overdue
        self._budget = MaskBudget(config or GrammarConfig(), clock=clock)
        self.records = GrammarRecords()
        self._texts: dict[RequestId, ConstrainedText] = {}
        self.wake: Callable[[], None] = lambda: None
        """Called when a mask is there, from any thread."""
        self._quick = MaskLane("masks", wake=lambda: self.wake())
        """Lane of grammars that were cheap so far, or have to be compiled."""
        self._slow = MaskLane("slow masks", wake=lambda: self.wake())
        self._left_s = _ROUND_S
        self.is_behind = False
        """True if masks were left to the next turn."""

    def text_of(self, request: Request) -> ConstrainedText | None:
        """Returns what restricts a text with these parameters; None: nothing.

        Raises RequestError for parameters that cannot be, and CapacityError for a caller over its
        budget, unless its grammar is known to be cheap.
        """
        sampling = request.sampling
        has_lists = sampling.allowed_token_ids is not None or bool(sampling.bad_words)
        if sampling.grammar is None and not has_lists:
            return None
        matcher = None
        if sampling.grammar is not None:
            if self._grammars is None:
                raise RequestError("this engine has no tokenizer, which grammars need")
            if not self.records.is_proven(digest_of(sampling.grammar)):
                self._budget.require_credit(request.caller)
            matcher = self._grammars.kept_matcher(sampling.grammar, ends=sampling.stop_token_ids)
        return ConstrainedText(request, matcher, self, vocab_size=self._vocab_size)

    def admit(self, text: ConstrainedText) -> None:
        self._texts[text.request_id] = text

    def end(self, request_id: RequestId) -> None:
        text = self._texts.pop(request_id, None)
        if text is not None and text.is_asked:
            self._quick.drop(text)
            self._slow.drop(text)

    def lacks(self, request_id: RequestId) -> bool:
        """Returns whether the next token of a request cannot be chosen yet."""
        text = self._texts.get(request_id)
        return text is not None and not text.is_ready

    @property
    def is_waiting(self) -> bool:
        """True while threads make masks of live texts."""
        return any(text.is_asked for text in tuple(self._texts.values()))

    def begin_turn(self) -> None:
        """Takes the masks that are there, and makes those of texts that lack one, or has them made.
        Texts that run come before new ones, and those that have waited longest first."""
        self._left_s, self.is_behind = _ROUND_S, False
        if self._quick.has_work or self._slow.has_work:
            self._take_results(wait_s=0.0)
        if not self._texts:
            return
        for text in sorted(self._texts.values(), key=lambda candidate: candidate.is_new):
            if not text.is_ready and not text.is_asked:
                self._make(text)
        if self._quick.has_work:
            self._take_results(wait_s=_WAIT_S)

    def committed(self, emissions: Iterable[Emission]) -> None:
        """Takes the new tokens of a round."""
        for emission in emissions:
            text = self._texts.get(emission.request_id)
            if text is None or not emission.tokens:
                continue
            text.extend(emission.tokens)
            del self._texts[text.request_id]  # behind those that wait for their turn
            self._texts[text.request_id] = text

    def after_draft(
        self, text: ConstrainedText, draft: Sequence[int], *, is_needed: bool
    ) -> bytes | None:
        """Makes a mask within a draft: see `MaskMaker`."""
        if not is_needed and (self._left_s <= 0 or self._is_overdue()):
            return None
        matcher = text.matcher
        assert matcher is not None, text.request_id
        mask = self._timed(text, partial(matcher.mask_after, draft, may_recompile=False))
        if matcher.failure is not None and not is_needed:  # its states are used up
            return None
        return mask

    def close(self) -> None:
        self._quick.close()
        self._slow.close()

    def _make(self, text: ConstrainedText) -> None:
        """Makes the mask after a text here, or asks a lane for it."""
        if text.grammar is None:
            text.put(None)
            return
        lane = self._lane_of(text)
        if lane is None:
            if self._left_s > 0 and not self._is_overdue():
                self._make_inline(text)
            self.is_behind = self.is_behind or not text.is_ready
            return
        text.is_asked, text.drafts = True, False
        lane.ask(MaskJob(text=text, run=self._work_on(text)))

    def _lane_of(self, text: ConstrainedText) -> MaskLane | None:
        """Returns where the mask after a text is made; None: here."""
        if self.records.is_slow(text.digest):
            return self._slow
        if self._budget.is_flagged(text.caller):
            return self._quick if self.records.is_proven(text.digest) else self._slow
        if text.matcher is None or text.matcher.failure is not None:
            return self._quick
        return None

    def _make_inline(self, text: ConstrainedText) -> None:
        matcher, tokens = text.matcher, text.tokens
        assert matcher is not None
        first = matcher.num_read + _CHUNK
        for end in (*range(first, len(tokens), _CHUNK), len(tokens)):
            self._timed(text, partial(matcher.read, tokens[:end], may_recompile=False))
            if self.records.is_slow(text.digest) or matcher.failure is not None:
                return  # the rest in a lane
        mask = self._timed(text, partial(matcher.mask_after, may_recompile=False))
        if matcher.failure is None:
            text.put(mask)
            text.drafts = not self.records.is_slow(text.digest)

    def _timed(self, text: ConstrainedText, work: Callable[[], bytes | None]) -> bytes | None:
        started = time.thread_time()
        result = work()
        seconds = time.thread_time() - started
        self._left_s -= seconds
        self._charge(text, seconds)
        return result

    def _work_on(self, text: ConstrainedText) -> Callable[[], MadeMask]:
        grammars, tokens = self._grammars, list(text.tokens)
        assert grammars is not None
        assert text.grammar is not None
        grammar = text.grammar

        def run() -> MadeMask:
            started = time.thread_time()
            if text.matcher is None:
                text.matcher = grammars.matcher(grammar)
            mask, library_s = text.matcher.mask_in_thread(tokens)
            return MadeMask(mask, time.thread_time() - started + library_s)

        return run

    def _take_results(self, *, wait_s: float) -> None:
        for result in self._quick.results(wait_s=wait_s, limit_s=_MOST_S):
            self._take(result)
        for result in self._slow.results(limit_s=_MOST_S):
            self._take(result)

    def _take(self, result: MaskResult) -> None:
        text = result.text
        if self._texts.get(text.request_id) is not text:
            return  # it has left
        text.is_asked = False
        self._charge(text, result.seconds)
        failure = result.error
        if failure is None and text.matcher is not None:
            failure = text.matcher.failure
        if failure is not None:
            text.fail(failure)
        elif text.failure is None:
            text.put(result.mask)

    def _charge(self, text: ConstrainedText, seconds: float) -> None:
        """Takes what a mask has cost; ends the text that is over a budget."""
        self.records.note(text.digest, seconds)
        if seconds < CHEAP_S:
            return
        text.spent_s += self._budget.charge(text.caller, seconds)
        excess = self._budget.excess(text.caller, spent_s=text.spent_s)
        if excess is not None and text.failure is None:
            logger.warning("a grammar took too much time: request=%s", text.request_id)
            text.fail(excess)
