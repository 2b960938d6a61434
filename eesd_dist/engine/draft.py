"""The draft stage: embedding, layers [0, N) and the exit head of one pipeline.

Every token of every request, drafted or known, runs through these layers; the verify stage
continues from their hidden states. Drafts grow level by level: the exit head's best next tokens of
all requests are offered to the policy, and the tokens it takes are computed together. For trees,
alternatives are offered too, each with its ancestors as history and for its noise. Does not depend
on queues, replies, channels or the number of ranks.
"""

# Shapes: T rows, A frontier tokens, D hidden size, E exit head input, B alternatives, V vocabulary
# (or the draft vocabulary).

from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eesd_dist.config import TreeConfig
from eesd_dist.control.chain_rule import REFUSAL, ChainReport, ChainRule, of_length
from eesd_dist.control.policy import DraftPolicy
from eesd_dist.engine.draft_ranks import DraftCompute
from eesd_dist.engine.draft_run import (
    MOST_GIVEN,
    Candidate,
    DraftRun,
    DraftState,
    RowSlice,
    joined,
    one_slice,
    roll_back,
)
from eesd_dist.engine.guesses import Guess, Guesser, offer_of
from eesd_dist.engine.ngrams import Match
from eesd_dist.model.attention.rows import RowSegment
from eesd_dist.model.heads.exit_head import ExitHead
from eesd_dist.model.layers.paged_layers import LayerRows
from eesd_dist.model.span import LlamaSpan
from eesd_dist.sampling.row_rules import chooses_by_score, noise_temperature
from eesd_dist.schedule.scheduler import PlanItem, RoundPlan
from eesd_dist.transport.contracts import TensorGroup
from eesd_dist.types import Evidence, RequestId

if TYPE_CHECKING:
    from eesd_dist.engine.compiled.drafter import ChainDrafter

__all__ = ["Candidate", "DraftRun", "DraftStage", "DraftState", "DraftedRound"]

_CATCH_UP_ROWS = 32
"""In rounds without drafts the exit head lags behind; it catches up this many rows at a time."""


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
        compute: DraftCompute,
        page_size: int,
        device: torch.device,
        rejection: bool = False,
        log_evidence: bool = False,
        tree: TreeConfig | None = None,
    ) -> None:
        """`tree`: number of alternatives for requests that draft trees."""
        self._compute = compute
        self.page_size = page_size
        self.device = device
        self._rejection = rejection
        self._log_evidence = log_evidence
        self._guesser = Guesser(compute, tree=tree or TreeConfig(), rejection=rejection)
        self._states: dict[RequestId, DraftState] = {}
        self._ahead_of: set[RequestId] = set()

    @property
    def span(self) -> LlamaSpan:
        """This rank's part of layers [0, N)."""
        return self._compute.span

    @property
    def head(self) -> ExitHead | None:
        """This rank's part of the exit head; None: no drafts."""
        return self._compute.head

    @property
    def group(self) -> TensorGroup:
        """The ranks of this stage."""
        return self._compute.group

    @property
    def chain(self) -> "ChainDrafter | None":
        """The drafting of one request's chain as one compiled call; None where there is none."""
        return self._compute.chain

    def swap_head(self, head: ExitHead) -> None:
        """Replaces the exit head between two rounds. The new head takes over the old one's keys and
        values: for a head trained further from the old one they are nearly right, and a wrong draft
        changes no text."""
        self._compute.take_head(head)

    def forget(self, request_id: RequestId) -> None:
        self._states.pop(request_id, None)

    def drop_ahead(self, *, keep: Set[RequestId]) -> None:
        """Drops candidates drafted ahead for all requests but these."""
        for request_id in self._ahead_of - keep:
            state = self._states.get(request_id)
            if state is not None:
                state.ahead = deque()
        self._ahead_of &= keep

    @torch.inference_mode()
    def forget_all(self) -> None:
        """Starts a new epoch, in which no page is valid yet."""
        self._states.clear()
        self._compute.begin()

    def check(self) -> None:
        """Raises PeerLost if earlier drafts must not be used, since a rank is lost."""
        self._compute.check()

    def close(self) -> None:
        self._compute.close()

    @torch.inference_mode()
    def draft(
        self, plan: RoundPlan, policy: DraftPolicy, *, overlapped: bool = False
    ) -> DraftedRound:
        """Runs the known rows, then drafts level by level what the policy chooses.

        `overlapped`: another microbatch is being verified at the same time.
        """
        runs = [self._open(item) for item in plan.items]
        drafting = [run for run in runs if run.item.max_draft > 0 and run.item.is_final]
        if self.head is not None:
            awake = policy.begin_round(
                [run.request_id for run in drafting],
                overlapped=overlapped,
                num_requests=len(runs),
                num_known=sum(run.item.num_known for run in runs),
            )
            for run in drafting:
                run.rests = run.request_id not in awake
                if not run.rests:
                    self._look_up(run, policy)
            drafting = [run for run in drafting if not (run.is_lookup or run.rests)]
        chain = self._chain_for(runs)
        rule = policy.chain_rule(temperature=_noise(runs[0])) if chain and drafting else None
        if chain is not None and rule is not None:
            policy.report(self._draft_chain(runs[0], chain, rule))
        elif chain is not None and not drafting:
            self._draft_chain(runs[0], chain, of_length(0))
        elif chain is not None and not policy.needs_probs([runs[0].request_id]):
            self._draft_by_steps(runs[0], chain, policy)
        else:
            self._run_known(runs)
            if self.head is not None:
                self._draft_on(drafting, policy)
        pieces = [piece for run in runs for piece in run.rows_TD]
        probs = [row for run in runs for row in run.probs_V]
        return DraftedRound(
            runs=tuple(runs),
            hidden_TD=joined(pieces),
            draft_probs_KV=torch.stack(probs) if probs else None,
        )

    def _chain_for(self, runs: Sequence[DraftRun]) -> "ChainDrafter | None":
        """Returns the compiled call that can do this round: one known row of one request, with
        tokens chosen among all and without alternatives."""
        chain = self._compute.chain
        if chain is None or len(runs) != 1 or self._rejection or self._log_evidence:
            return None
        (run,) = runs
        is_plain = (
            run.item.num_known == 1
            and not run.is_tree
            and not run.prefetched
            and run.item.live.request.features is None
        )
        live = run.item.live
        by_score = chooses_by_score(live.request.sampling, num_generated=live.num_generated)
        return chain if is_plain and by_score else None

    def _look_up(self, run: DraftRun, policy: DraftPolicy) -> None:
        """Drafts what followed the text's last tokens before, where that promises more."""
        if run.is_tree or run.prefetched or self._rejection:
            return
        found: list[Match] = []

        def find() -> tuple[int, int]:
            limit = min(run.item.max_draft, MOST_GIVEN)
            match = run.state.ngrams.match(run.item.live.tokens, limit)
            if match is None:
                return 0, 0
            found.append(match)
            return match.context, len(match.tokens)

        length = policy.lookup_length(run.request_id, find)
        if length:
            run.look_up(found[0].tokens[:length])

    def _draft_chain(self, run: DraftRun, chain: "ChainDrafter", rule: ChainRule) -> ChainReport:
        """Runs the known row and drafts by the rule, in one call."""
        item, state = run.item, run.state
        request, temperature = item.live.request, _noise(run)
        if state.num_lagging >= _CATCH_UP_ROWS:
            self._catch_up([run])
        may_guess = len(rule.prices) > 1
        drafted = chain.draft(
            item.live.tokens[item.start],
            given=run.tokens,
            at=item.start,
            pages=item.pages,
            lagging=one_slice(state.lagging_TE) if may_guess and state.lagging_TE else None,
            rule=rule,
            most=item.max_draft if item.is_final else 0,
            seed=request.sampling.seed,
            temperature=temperature,
        )
        report, rows_TD = drafted.report, RowSlice.all_of(drafted.hidden_TD)
        if run.is_lookup:
            run.rows_TD.append(rows_TD)
        else:
            evidence = [
                Evidence(depth=depth, temperature=temperature, gap=gap)
                for depth, gap in enumerate(drafted.gaps[: report.num_drafted])
            ]
            run.take_chain(drafted.tokens[: report.num_drafted], evidence, rows_TD)
        if request.speculation.mode == "auto":
            run.note_chain(num_guesses=len(report.means))
        return report

    def _draft_by_steps(self, run: DraftRun, chain: "ChainDrafter", policy: DraftPolicy) -> None:
        """Runs the known row and drafts in one call per token: the policy asks for the evidence of
        each."""
        item, state, temperature = run.item, run.state, _noise(run)
        token: int = item.live.tokens[item.start]
        at = item.start
        if state.num_lagging >= _CATCH_UP_ROWS:
            self._catch_up([run])
        while True:
            guesses = run.may_grow and run.request_id in policy.worth_a_guess([run.request_id])
            drafted = chain.draft(
                token,
                at=at,
                pages=item.pages,
                lagging=one_slice(state.lagging_TE) if state.lagging_TE else None,
                rule=REFUSAL if guesses else of_length(0),
                most=1 if guesses else 0,
                seed=item.live.request.sampling.seed,
                temperature=temperature,
            )
            run.note_row(at, RowSlice.all_of(drafted.hidden_TD), is_read=guesses)
            if not guesses:
                return
            (token,), (gap,), (parent,) = drafted.tokens, drafted.gaps, run.frontier
            evidence = Evidence(depth=len(run.tokens), temperature=temperature, gap=gap)
            candidate = Candidate(token=token, evidence=evidence, probs_V=None)
            (is_taken,) = policy.choose([offer_of(Guess(run, parent, 0, candidate))])
            if not is_taken:
                return
            run.append(candidate, parent=parent, rank=0)
            at += 1

    def _open(self, item: PlanItem) -> DraftRun:
        request_id = item.live.request.request_id
        state = self._states.setdefault(request_id, DraftState())
        run = DraftRun(item=item, state=state)
        if (
            state.ahead
            and state.ahead_from == item.start
            and item.num_known == 1
            and item.pages[: len(state.ahead_pages)] == state.ahead_pages
        ):
            run.prefetched = state.ahead
        else:  # preempted, resumed from a shorter cached prefix, or not drafted ahead
            roll_back(state, item.start)
        state.ahead = deque()
        return run

    def _run_known(self, runs: list[DraftRun]) -> None:
        """Computes the known rows of all requests at once; reuses those computed ahead."""
        fresh: list[DraftRun] = []
        for run in runs:
            if run.prefetched:
                known = run.prefetched.popleft()
                assert known.hidden_D is not None
                run.rows_TD.append(RowSlice.all_of(known.hidden_D.unsqueeze(0)))
            else:
                fresh.append(run)
        if not fresh:
            return
        tokens: list[int] = []
        for run in fresh:
            item = run.item
            tokens.extend(item.live.tokens[item.start : item.start + item.num_known])
            tokens.extend(run.tokens)
        kept = _rows_to_keep(fresh)
        hidden_TD, input_TE = self._compute.run_layers(
            tokens,
            [
                RowSegment(run.item.start, run.item.num_known + len(run.tokens), run.item.pages)
                for run in fresh
            ],
            kept=kept,
        )
        at = 0
        for run in fresh:
            num_known = run.item.num_known
            end = at + num_known + len(run.tokens)
            run.rows_TD.append(RowSlice(hidden_TD, at, end))
            if kept is not None:
                rows = slice(at, at + num_known)
                run.kept_TD = {layer: x_TD[rows] for layer, x_TD in kept.rows.items()}
            if run.item.live.request.speculation.mode == "auto":
                self._note_lagging(run, RowSlice(input_TE, at, end))
            at = end

    def _note_lagging(self, run: DraftRun, input_TE: RowSlice) -> None:
        state, item = run.state, run.item
        if self.head is None:
            return
        if not state.lagging_TE and state.exit_len < item.start:
            state.exit_len = item.start  # prefix from the page cache, with the exit head's rows
        state.lagging_TE.append(input_TE)
        drafts = item.is_final and item.max_draft > 0 and not (run.is_lookup or run.rests)
        if state.num_lagging >= _CATCH_UP_ROWS and not drafts:
            self._catch_up([run])

    def _catch_up(self, runs: list[DraftRun]) -> None:
        """Runs the exit head over the rows it has not seen; keeps its output at the frontier."""
        pieces: list[RowSlice] = []
        segments: list[RowSegment] = []
        for run in runs:
            unseen, segment = run.unseen()
            pieces.extend(unseen)
            segments.append(segment)
        out_TD = self._compute.run_head(joined(pieces), segments)
        end = 0
        for run, segment in zip(runs, segments, strict=True):
            end += segment.num_rows
            run.note_seen(RowSlice(out_TD, end - segment.num_rows, end))

    def _draft_on(self, runs: list[DraftRun], policy: DraftPolicy) -> None:
        active = self._worth_guessing(runs, policy)
        while active:
            with_probs = (
                self._log_evidence
                or any(run.item.live.tree == "dynamic" for run in active)
                or policy.needs_probs([run.request_id for run in active])
            )
            guesses = self._guesses(active, with_probs=with_probs)
            taken: list[Guess] = []
            for guess, is_taken in zip(
                guesses, policy.choose([offer_of(guess) for guess in guesses]), strict=True
            ):
                if is_taken:
                    taken.append(guess)
                elif not guess.run.is_tree:  # still the best guess for drafting ahead
                    guess.run.prefetched.appendleft(guess.candidate)
            self._take(taken)
            going_on = {id(guess.run) for guess in taken}
            active = self._worth_guessing(
                [run for run in active if id(run) in going_on and run.may_grow], policy
            )

    def _worth_guessing(self, runs: list[DraftRun], policy: DraftPolicy) -> list[DraftRun]:
        """Returns the runs for which the policy wants another guess; other drafts end here."""
        wanted = policy.worth_a_guess([run.request_id for run in runs])
        going_on = [run for run in runs if run.request_id in wanted or run.prefetched]
        for run in runs:
            ends = run.request_id not in wanted and not run.prefetched
            if ends and run.state.num_lagging >= _CATCH_UP_ROWS:
                self._catch_up([run])
        return going_on

    def _take(self, taken: list[Guess]) -> None:
        """Computes the taken candidates, one row each through layers [0, N), grouped by run."""
        fresh: dict[int, tuple[DraftRun, list[int]]] = {}
        for run, parent, rank, candidate in taken:
            if candidate.hidden_D is None:
                fresh.setdefault(id(run), (run, []))[1].append(candidate.token)
            else:
                run.rows_TD.append(RowSlice.all_of(candidate.hidden_D.unsqueeze(0)))
            run.append(candidate, parent=parent, rank=rank)
        if not fresh:
            return
        levels = list(fresh.values())
        hidden_AD, input_AE = self._compute.run_layers(
            [token for _, tokens in levels for token in tokens],
            [run.last_rows(len(tokens)) for run, tokens in levels],
        )
        at = 0
        for run, tokens in levels:
            end = at + len(tokens)
            run.note_level(RowSlice(hidden_AD, at, end), RowSlice(input_AE, at, end))
            at = end

    def _guesses(self, runs: list[DraftRun], *, with_probs: bool) -> list[Guess]:
        """Returns guesses after each run's frontier, run by run: for a chain one, for a tree the
        best ones of each token, first choices first, up to the tree's room."""
        missing = [run for run in runs if not run.prefetched]
        fresh = self._guess(missing, with_probs=with_probs) if missing else []
        found = {id(run): guesses for run, guesses in zip(missing, fresh, strict=True)}
        for run in runs:
            if run.prefetched:
                (frontier_node,) = run.frontier
                found[id(run)] = [Guess(run, frontier_node, 0, run.prefetched.popleft())]
        return [guess for run in runs for guess in found[id(run)]]

    def _guess(self, runs: list[DraftRun], *, with_probs: bool) -> list[list[Guess]]:
        """Draws the exit head's next tokens for each run, with the noise the verifier will use."""
        behind = [run for run in runs if run.is_unseen]
        if behind:
            self._catch_up(behind)
        return self._guesser.guess(runs, with_probs=with_probs)

    def go_ahead(
        self, drafted: DraftedRound, policy: DraftPolicy, *, until: Callable[[], bool]
    ) -> None:
        """Drafts past the end of the draft until the verdict arrives, for a single request."""
        if self._chain_for(drafted.runs) is not None:
            return  # drafting one token at a time takes longer than the next chain
        while not until():
            runs = self._ahead_room(drafted.runs)
            if len(runs) != 1:
                break
            (run,) = runs
            if run.is_tree or run.is_lookup:  # a tree's verdict may fall on any branch
                break
            if len(run.state.ahead) > run.item.max_draft:
                break
            self._guess_ahead(run, with_probs=policy.needs_probs([run.request_id]))

    def _ahead_room(self, runs: Sequence[DraftRun]) -> list[DraftRun]:
        """Returns the runs that may draft ahead while their verdict is pending: those with room in
        their pages and in the model's positions."""
        return [
            run
            for run in runs
            if run.item.max_draft > 0
            and run.item.is_final
            and not run.rests
            and run.next_place + len(run.state.ahead)
            < min(len(run.item.pages) * self.page_size, run.item.live.max_len)
        ]

    @torch.inference_mode()
    def _guess_ahead(self, run: DraftRun, *, with_probs: bool) -> None:
        """Guesses one more token past the draft; useful if the whole draft is accepted."""
        assert not run.is_tree, "the accepted branch of a tree is not known yet"
        ahead = run.state.ahead
        if not ahead:
            run.state.ahead_from = run.next_place
            run.state.ahead_pages = run.item.pages
            self._ahead_of.add(run.item.live.request.request_id)
        shadow = DraftRun(item=run.item, state=run.state, exit_AD=run.exit_AD)
        for at, token in enumerate([*run.tokens, *(c.token for c in ahead)]):
            shadow.append_token(token, parent=at - 1)
        shadow.frontier = [len(shadow.tokens) - 1]
        if run.prefetched:
            guess = run.prefetched.popleft()
        else:
            (((_, _, _, guess),),) = self._guess(
                [shadow], with_probs=with_probs or self._log_evidence
            )
        if guess.hidden_D is None:
            hidden_1D, input_1E = self._compute.run_layers(
                [guess.token], [RowSegment(shadow.next_place, 1, run.item.pages)]
            )
            run.state.lagging_TE.append(RowSlice.all_of(input_1E))
            run.exit_AD = None
            guess = Candidate(
                token=guess.token,
                evidence=guess.evidence,
                probs_V=guess.probs_V,
                hidden_D=hidden_1D[0],
            )
        else:
            run.exit_AD = shadow.exit_AD
        ahead.append(guess)

    def settle(
        self, run: DraftRun, *, path: Sequence[int], next_token: int
    ) -> list[tuple[int, int]]:
        """Rolls this request's exit-head state back to the accepted part of the draft.

        `path`: the accepted drafted tokens. Returns the KV moves, (from, to) each, that put an
        accepted branch into its KV slots in the text; `move` does them in this stage.
        """
        state, item = run.state, run.item
        if run.is_tree:
            run.keep_branch(path, drafts=self.head is not None)
            return run.moves(path, page_size=self.page_size)
        keep = item.start + item.num_known + len(path)
        ahead = state.ahead
        # Candidates left over from an earlier round are already computed: keep or drop them all.
        while ahead and run.prefetched and run.prefetched[0].hidden_D is not None:
            ahead.append(run.prefetched.popleft())
        if ahead and len(path) == len(run.tokens) and ahead[0].token == next_token:
            for depth, candidate in enumerate(list(ahead)[1:]):
                ahead[depth + 1] = candidate.at_depth(depth)
            return []
        state.ahead = deque()
        if self.head is not None and item.live.request.speculation.mode == "auto":
            roll_back(state, keep)
        return []

    @torch.inference_mode()
    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Does KV moves in the pages of the layers and of the exit head."""
        self._compute.move(moves)


def _noise(run: DraftRun) -> float:
    """Returns the temperature of the request's choices, 0 for greedy ones."""
    return noise_temperature(run.item.live.request.sampling.temperature)


def _rows_to_keep(runs: Sequence[DraftRun]) -> LayerRows | None:
    wanted = [run.item.live.request.features for run in runs]
    exits = {layer for spec in wanted if spec is not None for layer in spec.exits}
    return LayerRows(exits) if exits else None
