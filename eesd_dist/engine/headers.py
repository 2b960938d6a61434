"""Writes the headers of rounds, which the verify stage gets in addition to the hidden states."""

import threading
from collections.abc import Callable, Sequence

from eesd_dist.engine.drafting.stage import DraftedRound, DraftRun
from eesd_dist.engine.recording.recorder import RecorderTap
from eesd_dist.engine.recording.text_features import FeatureTap
from eesd_dist.schedule.plans import RoundPlan
from eesd_dist.transport.contracts import Move, RoundHeader, Segment
from eesd_dist.trees import ROOT
from eesd_dist.types import NO_TRACE, RequestId, RoundTrace, TokenId

TraceRound = Callable[[Sequence[str | None]], RoundTrace]
"""Decides from the traceparents of a round's requests which of their traces have the round."""


class KvMoves:
    """KV moves of accepted branches that the verify stage has not done yet. Thread-safe.

    The next header of any request has them, and they are done before its rows are computed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: list[Move] = []
        self._round_moves: dict[int, tuple[Move, ...]] = {}

    def add(self, moves: Sequence[Move]) -> None:
        with self._lock:
            self._pending += moves

    def take(self, round_id: int) -> tuple[Move, ...]:
        """Returns all pending moves, for this round's header."""
        with self._lock:
            moves, self._pending = tuple(self._pending), []
            if moves:
                self._round_moves[round_id] = moves
            return moves

    def settle(self, round_id: int) -> None:
        """Drops this round's moves: its reply has arrived, so that they are done."""
        with self._lock:
            self._round_moves.pop(round_id, None)

    def clear(self) -> None:
        with self._lock:
            self._pending.clear()
            self._round_moves.clear()

    def pages(self, page_size: int) -> set[int]:
        """Returns the pages with pending moves: an accepted branch is not in its KV slots there
        yet, or is still in a page that its request has freed."""
        with self._lock:
            moves = [
                *self._pending,
                *(move for round_moves in self._round_moves.values() for move in round_moves),
            ]
        return {slot // page_size for move in moves for slot in move}


class HeaderWriter:
    """Numbers the rounds and writes their headers."""

    def __init__(
        self,
        *,
        epoch: int,
        moves: KvMoves,
        page_size: int,
        by_rejection: bool,
        trace_round: TraceRound | None,
        recorder: RecorderTap | None,
        features: FeatureTap,
    ) -> None:
        """`trace_round`: None without tracing."""
        self.epoch = epoch
        self._moves = moves
        self._page_size = page_size
        self._by_rejection = by_rejection
        self._trace_round = trace_round
        self._recorder = recorder
        self._features = features
        self._round_id = 0

    def trace(self, plan: RoundPlan) -> RoundTrace:
        """Decides which traces have the round."""
        if self._trace_round is None:
            return NO_TRACE
        return self._trace_round([item.live.request.traceparent for item in plan.items])

    def write(self, drafted: DraftedRound, trace: RoundTrace) -> RoundHeader:
        self._round_id += 1
        exits, top_k = self._features.exits_and_top_k(drafted.runs)
        if self._recorder is not None:
            top_k = max(top_k, self._recorder.prompt_top_k(drafted.runs))
        return RoundHeader(
            epoch=self.epoch,
            round_id=self._round_id,
            segments=tuple(self._segment(run) for run in drafted.runs),
            trace_id=trace.trace_id.to_bytes(16),
            span_id=trace.span_id,
            wants_rejection=self._by_rejection,
            kv_moves=self._moves.take(self._round_id),
            exits=exits,
            top_k=top_k,
        )

    def settle(self, round_id: int, moves: Sequence[Move]) -> None:
        """Completes a round; `moves`: the KV moves of its verdict."""
        self._moves.settle(round_id)
        self._moves.add(moves)

    def attach(self, epoch: int) -> None:
        """Continues with stages in which no page is valid."""
        self.epoch = epoch
        self._moves.clear()

    def _segment(self, run: DraftRun) -> Segment:
        records_prompt = self._recorder is not None and self._recorder.wants_prompt(run)
        return _segment(
            run,
            self._page_size,
            num_recorded=self._num_recorded(run.request_id),
            wants_features=records_prompt or run.item.live.request.features is not None,
        )

    def _num_recorded(self, request_id: RequestId) -> int:
        """Returns how many of the target's best tokens the recorder needs per row of a request."""
        return 0 if self._recorder is None else self._recorder.top_k(request_id)


def _segment(run: DraftRun, page_size: int, *, num_recorded: int, wants_features: bool) -> Segment:
    item = run.item
    live, p = item.live, item.live.request.sampling
    num_rows = item.num_known + len(run.tokens)
    end = item.start + num_rows
    return Segment(
        start=item.start,
        num_rows=num_rows,
        parents=run.branching,
        num_sampled=1 + len(run.tokens) if item.is_final else 0,
        pages=item.pages[: -(-end // page_size)],
        tokens=(*live.tokens[item.start : item.start + item.num_known], *run.tokens),
        history=tuple(live.tokens[: item.start]) if p.needs_history else (),
        num_prompt=live.num_prompt,
        params=live.choice_params,
        wants_features=wants_features,
        forced=_forced(run),
        forced_top_logprobs=p.prompt_logprobs or 0,
        masks=_masks(run) if item.is_final and run.constraint is not None else b"",
        # The recorder's tokens are never returned: responses have what the request asked for.
        top_logprobs=max(p.top_logprobs or 0, num_recorded) if num_recorded else p.top_logprobs,
    )


def _forced(run: DraftRun) -> tuple[TokenId, ...]:
    """Returns the tokens of the prompt that follow its rows, where they are reported."""
    item = run.item
    if not item.live.wants_prompt_logprobs:
        return ()
    prompt = item.live.request.prompt
    return prompt[item.start + 1 : item.start + 1 + item.num_known]


def _masks(run: DraftRun) -> bytes:
    """Returns a mask for the row of the last known token, and for each of the draft."""
    return b"".join(run.mask_after(node) for node in range(ROOT, len(run.tokens)))
