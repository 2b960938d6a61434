"""The draft stage: embedding, layers [0, N) and the exit head of one pipeline.

Every token of every request passes through here, drafted or known; what comes out are the hidden
states that the verify stage goes on from. It asks a controller before each drafted token and knows
nothing of queues, of the verifier's answers or of how rounds travel.
"""

# Shapes: T rows, A runs that go on drafting, D hidden size, V vocabulary (or the draft vocabulary).

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eesd_dist.config import Numerics
from eesd_dist.control.policy import DraftPolicy, Offer
from eesd_dist.model.exit_head import ExitHead
from eesd_dist.model.rows import RowPlan, RowSegment
from eesd_dist.model.span import LlamaSpan
from eesd_dist.sampling.evidence import evidence_of
from eesd_dist.sampling.rejection import draft_sample
from eesd_dist.sampling.rows import RowRule
from eesd_dist.sampling.rule import draft_choice
from eesd_dist.schedule.scheduler import PlanItem, RoundPlan
from eesd_dist.types import Evidence, RequestId

_CATCH_UP_ROWS = 16
"""Rounds without drafts leave the exit head behind; it catches up this many rows at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The exit head's next guess, not yet drafted."""

    token: int
    evidence: Evidence
    probs_V: Tensor | None
    """The distribution it was drawn from; only rejection sampling asks for it."""
    hidden_D: Tensor | None = None
    """Its row after layer N, when it was computed ahead of time."""


@dataclass(slots=True, kw_only=True)
class DraftState:
    """What the draft stage remembers of a request between rounds: a cache, never needed."""

    exit_len: int = 0
    """Positions whose exit-head keys and values are valid."""
    lagging_TD: list[Tensor] = field(default_factory=list)
    """Rows after layer N from position exit_len on, which the exit head has not seen yet."""
    ahead_from: int = 0
    ahead_pages: tuple[int, ...] = ()
    """The page table that work was done in; under another one it is worth nothing."""
    ahead: deque[Candidate] = field(default_factory=deque)
    """Work done while the last verdict was under way: the token at position `ahead_from` and
    further candidates, each with its row already computed except perhaps the last."""


@dataclass(slots=True, kw_only=True)
class DraftRun:
    """One request's part of a round: known rows, then drafted rows."""

    item: PlanItem
    state: DraftState
    rows_TD: list[Tensor] = field(default_factory=list)
    """Pieces [n, D] in order of position, from item.start."""
    tokens: list[int] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    probs_V: list[Tensor] = field(default_factory=list)
    prefetched: deque[Candidate] = field(default_factory=deque)
    exit_row_D: Tensor | None = None
    """The exit head's output at the newest row, when it has seen it."""

    @property
    def request_id(self) -> RequestId:
        return self.item.live.request.request_id

    @property
    def next_position(self) -> int:
        return self.item.start + self.item.num_known + len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedRound:
    runs: tuple[DraftRun, ...]
    hidden_TD: Tensor
    draft_probs_KV: Tensor | None


class DraftStage:
    """Layers [0, N) and the exit head, with the KV pages of both."""

    def __init__(
        self,
        *,
        span: LlamaSpan,
        head: ExitHead | None,
        page_size: int,
        device: torch.device,
        numerics: Numerics,
        rejection: bool = False,
        log_evidence: bool = False,
    ) -> None:
        self.span = span
        self.head = head
        self.page_size = page_size
        self.device = device
        self._numerics: Numerics = numerics
        self._rejection = rejection
        self._log_evidence = log_evidence
        self._states: dict[RequestId, DraftState] = {}
        self._ahead_of: set[RequestId] = set()
        self._segments: list[RowSegment] = []
        self._rows: RowPlan | None = None
        """The plan of `_segments`, the rows computed last; None before the first ones."""

    def swap_head(self, head: ExitHead) -> None:
        """Between two rounds. The new head goes on with the old one's keys and values: for one that
        was trained on from it they are nearly its own, and a draft may be wrong at any time."""
        if self.head is not None:
            head.take_pages(self.head)
        self.head = head

    def forget(self, request_id: RequestId) -> None:
        self._states.pop(request_id, None)

    def drop_ahead(self, *, keep: Set[RequestId]) -> None:
        """Forgets what was drafted ahead for any request but these."""
        for request_id in self._ahead_of - keep:
            state = self._states.get(request_id)
            if state is not None:
                state.ahead = deque()
        self._ahead_of &= keep

    def forget_all(self) -> None:
        self._states.clear()

    @torch.inference_mode()
    def draft(
        self, plan: RoundPlan, policy: DraftPolicy, *, overlapped: bool = False
    ) -> DraftedRound:
        """Runs the known rows, then drafts level by level what the policy chooses.

        `overlapped`: another cohort's round is being verified meanwhile.
        """
        runs = [self._open(item) for item in plan.items]
        self._run_known(runs)
        if self.head is not None:
            drafting = [run for run in runs if run.item.max_draft > 0 and run.item.is_final]
            policy.begin_round(
                [run.request_id for run in drafting],
                overlapped=overlapped,
                num_requests=len(runs),
                num_known=sum(run.item.num_known for run in runs),
            )
            self._draft_on(drafting, policy)
        pieces = [piece for run in runs for piece in run.rows_TD]
        probs = [row for run in runs for row in run.probs_V]
        return DraftedRound(
            runs=tuple(runs),
            hidden_TD=pieces[0] if len(pieces) == 1 else torch.cat(pieces),
            draft_probs_KV=torch.stack(probs) if probs else None,
        )

    def _open(self, item: PlanItem) -> DraftRun:
        request_id = item.live.request.request_id
        state = self._states.setdefault(request_id, DraftState())
        run = DraftRun(item=item, state=state)
        same_pages = item.pages[: len(state.ahead_pages)] == state.ahead_pages
        if state.ahead and state.ahead_from == item.start and item.num_known == 1 and same_pages:
            run.prefetched = state.ahead
        else:  # preempted, resumed from a shorter cached prefix, or nothing was done ahead
            _roll_back(state, item.start)
        state.ahead = deque()
        return run

    def _run_known(self, runs: list[DraftRun]) -> None:
        """Known rows of all requests at once; those computed ahead are taken as they are."""
        fresh: list[DraftRun] = []
        for run in runs:
            if run.prefetched:
                known = run.prefetched.popleft()
                assert known.hidden_D is not None
                run.rows_TD.append(known.hidden_D.unsqueeze(0))
            else:
                fresh.append(run)
        if not fresh:
            return
        tokens: list[int] = []
        for run in fresh:
            item = run.item
            tokens.extend(item.live.tokens[item.start : item.start + item.num_known])
        hidden_TD = self._forward(
            tokens, [(run.item.start, run.item.num_known, run.item.pages) for run in fresh]
        )
        at = 0
        for run in fresh:
            run.rows_TD.append(hidden_TD[at : at + run.item.num_known])
            at += run.item.num_known
            if run.item.live.request.speculation.mode == "auto":
                self._note_lagging(run)

    def _note_lagging(self, run: DraftRun) -> None:
        state, item = run.state, run.item
        if self.head is None:
            return
        if not state.lagging_TD and state.exit_len < item.start:
            state.exit_len = item.start  # prefix taken from the page cache, exit rows included
        state.lagging_TD.append(run.rows_TD[-1])
        if sum(piece.shape[0] for piece in state.lagging_TD) >= _CATCH_UP_ROWS and not (
            item.is_final and item.max_draft > 0
        ):
            self._catch_up([run])

    def _catch_up(self, runs: list[DraftRun]) -> None:
        """Shows the exit head the rows it has not seen; leaves its output at each newest row."""
        assert self.head is not None
        pieces: list[Tensor] = []
        segments: list[RowSegment] = []
        for run in runs:
            state = run.state
            num_rows = sum(piece.shape[0] for piece in state.lagging_TD)
            pieces.extend(state.lagging_TD)
            segments.append(
                RowSegment(start=state.exit_len, num_rows=num_rows, pages=run.item.pages)
            )
        hidden_TD = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        out_TD = self.head.forward(hidden_TD, self._plan(segments))
        end = 0
        for run, segment in zip(runs, segments, strict=True):
            end += segment.num_rows
            run.exit_row_D = out_TD[end - 1]
            run.state.exit_len += segment.num_rows
            run.state.lagging_TD.clear()

    def _draft_on(self, runs: list[DraftRun], policy: DraftPolicy) -> None:
        active = self._worth_guessing(runs, policy)
        while active:
            with_evidence = self._log_evidence or policy.needs_evidence(
                [run.request_id for run in active]
            )
            candidates = self._candidates(active, with_evidence=with_evidence)
            offers = [
                Offer(
                    request_id=run.request_id,
                    evidence=candidate.evidence,
                    parent=len(run.tokens) - 1,
                )
                for run, candidate in zip(active, candidates, strict=True)
            ]
            going_on: list[tuple[DraftRun, Candidate]] = []
            for run, candidate, is_taken in zip(
                active, candidates, policy.choose(offers), strict=True
            ):
                if is_taken:
                    going_on.append((run, candidate))
                else:
                    run.prefetched.appendleft(candidate)  # still the best guess, should we go ahead
            self._take(going_on)
            active = self._worth_guessing(
                [run for run, _ in going_on if len(run.tokens) < run.item.max_draft], policy
            )

    def _worth_guessing(self, runs: list[DraftRun], policy: DraftPolicy) -> list[DraftRun]:
        """Those whose next guess the policy wants to see; the drafts of the others end here."""
        wanted = policy.worth_a_guess([run.request_id for run in runs])
        going_on = [run for run in runs if run.request_id in wanted or run.prefetched]
        for run in runs:
            lag = sum(piece.shape[0] for piece in run.state.lagging_TD)
            if lag >= _CATCH_UP_ROWS and run.request_id not in wanted and not run.prefetched:
                self._catch_up([run])
        return going_on

    def _take(self, chosen: list[tuple[DraftRun, Candidate]]) -> None:
        """Drafts the chosen candidates: one row each through layers [0, N)."""
        fresh = [(run, c) for run, c in chosen if c.hidden_D is None]
        if fresh:
            hidden_AD = self._forward(
                [candidate.token for _, candidate in fresh],
                [(run.next_position, 1, run.item.pages) for run, _ in fresh],
            )
            for (run, _), row_D in zip(fresh, hidden_AD, strict=True):
                run.rows_TD.append(row_D.unsqueeze(0))
                run.state.lagging_TD.append(row_D.unsqueeze(0))
                run.exit_row_D = None
        for run, candidate in chosen:
            if candidate.hidden_D is not None:
                run.rows_TD.append(candidate.hidden_D.unsqueeze(0))
            run.tokens.append(candidate.token)
            run.evidence.append(candidate.evidence)
            if candidate.probs_V is not None:
                run.probs_V.append(candidate.probs_V)

    def _candidates(self, runs: list[DraftRun], *, with_evidence: bool) -> list[Candidate]:
        found: dict[int, Candidate] = {}
        missing: list[DraftRun] = []
        for run in runs:
            if run.prefetched:
                found[id(run)] = run.prefetched.popleft()
            else:
                missing.append(run)
        if missing:
            for run, candidate in zip(
                missing, self._guess(missing, with_evidence=with_evidence), strict=True
            ):
                found[id(run)] = candidate
        return [found[id(run)] for run in runs]

    def _guess(self, runs: list[DraftRun], *, with_evidence: bool) -> list[Candidate]:
        """The exit head's next token for each run, drawn with the noise the verifier will use."""
        assert self.head is not None
        behind = [run for run in runs if run.state.lagging_TD]
        if behind:
            self._catch_up(behind)
        exit_rows = [run.exit_row_D for run in runs]
        assert all(row is not None for row in exit_rows)
        exit_AD = torch.stack([row for row in exit_rows if row is not None])
        logits_AV = self.head.logits(exit_AD)
        rules = [self._rule(run) for run in runs]
        probs_AV: Tensor | None = None
        if self._rejection:
            sample = draft_sample(
                logits_AV,
                rules,
                [len(run.tokens) for run in runs],
                vocab_ids=self.head.vocab_ids,
                vocab_size=self.span.spec.vocab_size,
            )
            tokens, probs_AV = sample.tokens.tolist(), sample.probs
            gaps = [0.0] * len(runs)
        else:
            choice = draft_choice(logits_AV, rules, vocab_ids=self.head.vocab_ids)
            tokens, gaps = choice.tokens[:, 0].tolist(), choice.gaps.tolist()
        measures: Sequence[tuple[float, float, float]] = (
            evidence_of(logits_AV) if with_evidence else [(1.0, 1.0, 0.0)] * len(runs)
        )
        return [
            Candidate(
                token=tokens[i],
                evidence=Evidence(
                    depth=len(run.tokens),
                    top1_prob=measures[i][0],
                    top2_margin=measures[i][1],
                    entropy=measures[i][2],
                    gap=gaps[i],
                ),
                probs_V=None if probs_AV is None else probs_AV[i],
            )
            for i, run in enumerate(runs)
        ]

    def _rule(self, run: DraftRun) -> RowRule:
        live = run.item.live
        sampling = live.request.sampling
        return RowRule.of(
            sampling,
            position=run.next_position,
            num_prompt=live.num_prompt,
            history=(*live.tokens, *run.tokens) if sampling.needs_history else (),
        )

    @torch.inference_mode()
    def rehearse(self, *, position: int, pages: tuple[int, ...], drafts: bool) -> None:
        """One known or drafted token's work on pages that nobody owns yet, for the profile."""
        rows = self._plan([RowSegment(start=position, num_rows=1, pages=pages)])
        hidden_TD = self.span.forward(
            self.span.embed(torch.zeros(1, dtype=torch.int64, device=self.device)), rows
        )
        if drafts and self.head is not None:
            evidence_of(self.head.logits(self.head.forward(hidden_TD, rows)))

    def ahead_room(self, runs: Sequence[DraftRun]) -> list[DraftRun]:
        """Runs that may go on past their draft while its verdict is under way."""
        return [
            run
            for run in runs
            if run.item.max_draft > 0
            and run.item.is_final
            and run.next_position + len(run.state.ahead) < len(run.item.pages) * self.page_size
        ]

    @torch.inference_mode()
    def go_ahead(self, run: DraftRun, *, with_evidence: bool) -> None:
        """One more token past the draft, in the hope that the verifier agrees with all of it."""
        ahead = run.state.ahead
        if not ahead:
            run.state.ahead_from = run.next_position
            run.state.ahead_pages = run.item.pages
            self._ahead_of.add(run.item.live.request.request_id)
        shadow = DraftRun(item=run.item, state=run.state, exit_row_D=run.exit_row_D)
        shadow.tokens = [*run.tokens, *(c.token for c in ahead)]
        if run.prefetched:
            guess = run.prefetched.popleft()
        else:
            (guess,) = self._guess([shadow], with_evidence=with_evidence or self._log_evidence)
        if guess.hidden_D is None:
            (hidden_D,) = self._forward([guess.token], [(shadow.next_position, 1, run.item.pages)])
            run.state.lagging_TD.append(hidden_D.unsqueeze(0))
            run.exit_row_D = None
            guess = Candidate(
                token=guess.token, evidence=guess.evidence, probs_V=guess.probs_V, hidden_D=hidden_D
            )
        else:
            run.exit_row_D = shadow.exit_row_D
        ahead.append(guess)

    def settle(self, run: DraftRun, *, num_accepted: int, next_token: int) -> None:
        """Rolls this request's exit-head state back to what the verdict left of the draft."""
        state, item = run.state, run.item
        keep = item.start + item.num_known + num_accepted
        ahead = state.ahead
        # What an earlier round left over is computed already: it goes on with the rest, or falls.
        while ahead and run.prefetched and run.prefetched[0].hidden_D is not None:
            ahead.append(run.prefetched.popleft())
        if ahead and num_accepted == len(run.tokens) and ahead[0].token == next_token:
            for depth, candidate in enumerate(list(ahead)[1:]):
                ahead[depth + 1] = Candidate(
                    token=candidate.token,
                    evidence=Evidence(
                        depth=depth,
                        top1_prob=candidate.evidence.top1_prob,
                        top2_margin=candidate.evidence.top2_margin,
                        entropy=candidate.evidence.entropy,
                        gap=candidate.evidence.gap,
                    ),
                    probs_V=candidate.probs_V,
                    hidden_D=candidate.hidden_D,
                )
            return
        state.ahead = deque()
        if self.head is None or item.live.request.speculation.mode == "off":
            return
        _roll_back(state, keep)

    def _forward(self, tokens: list[int], segments: list[tuple[int, int, Sequence[int]]]) -> Tensor:
        tokens_T = torch.tensor(tokens, device=self.device)
        plan = self._plan(
            [RowSegment(start=start, num_rows=n, pages=pages) for start, n, pages in segments]
        )
        return self.span.forward(self.span.embed(tokens_T), plan)

    def _plan(self, segments: list[RowSegment]) -> RowPlan:
        """Made once for span and exit head when both run the same rows, as they mostly do."""
        if segments != self._segments or self._rows is None:
            self._segments = segments
            self._rows = RowPlan.build(
                segments, page_size=self.page_size, device=self.device, numerics=self._numerics
            )
        return self._rows


def _roll_back(state: DraftState, keep: int) -> None:
    """Forgets what the exit head has seen, or was about to see, from position `keep` on."""
    if state.exit_len >= keep:
        state.exit_len = keep
        state.lagging_TD.clear()
        return
    surplus = state.exit_len + sum(piece.shape[0] for piece in state.lagging_TD) - keep
    while surplus > 0:
        last_TD = state.lagging_TD.pop()
        if last_TD.shape[0] > surplus:
            state.lagging_TD.append(last_TD[: last_TD.shape[0] - surplus])
        surplus -= last_TD.shape[0]
