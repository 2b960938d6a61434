"""The draft stage: embedding, layers [0, N) and the exit head of one pipeline.

Every token of every request, drafted or known, runs through these layers; the verify stage
continues from their hidden states. A round of one request whose controller can say in advance how
it decides is drafted in one call; all others level by level (`levels`). Does not depend on queues,
replies, channels or the number of ranks.
"""

# Shapes: T rows, K drafted tokens, D hidden size, V vocabulary.

from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eesd_dist.config import TreeConfig
from eesd_dist.control.chain_rule import ChainReport, ChainRule, of_length
from eesd_dist.control.policy import DraftPolicy
from eesd_dist.engine.drafting.guesses import Guesser, chooses_plainly, noise_of
from eesd_dist.engine.drafting.levels import CATCH_UP_ROWS, LevelDrafter
from eesd_dist.engine.drafting.ngrams import Match
from eesd_dist.engine.drafting.ranks import DraftCompute
from eesd_dist.engine.drafting.run import (
    MOST_GIVEN,
    Candidate,
    DraftRun,
    DraftState,
    roll_back,
)
from eesd_dist.engine.row_slices import RowSlice, joined, one_slice
from eesd_dist.model.heads.exit_head import ExitHead
from eesd_dist.model.span import LlamaSpan
from eesd_dist.schedule.scheduler import PlanItem, RoundPlan
from eesd_dist.transport.contracts import TensorGroup
from eesd_dist.types import Evidence, RequestId

if TYPE_CHECKING:
    from eesd_dist.engine.compiled.calls import DraftCalls
    from eesd_dist.engine.compiled.drafter import ChainDrafter

__all__ = ["Candidate", "DraftRun", "DraftStage", "DraftState", "DraftedRound"]


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
        self._levels = LevelDrafter(
            compute,
            Guesser(compute, tree=tree or TreeConfig(), rejection=rejection),
            page_size=page_size,
            log_evidence=log_evidence,
        )
        self._states: dict[RequestId, DraftState] = {}

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
    def calls(self) -> "DraftCalls | None":
        """This stage's drafting in compiled calls; None where there are none."""
        return self._compute.calls

    def swap_head(self, head: ExitHead) -> None:
        """Replaces the exit head between two rounds. The new head takes over the old one's keys and
        values: for a head trained further from the old one they are nearly right, and a wrong draft
        changes no text."""
        self._compute.take_head(head)

    def forget(self, request_id: RequestId) -> None:
        self._states.pop(request_id, None)

    def drop_ahead(self, *, keep: Set[RequestId]) -> None:
        """Drops candidates drafted ahead for all requests but these."""
        for request_id in self._levels.ahead_of(keep=keep):
            state = self._states.get(request_id)
            if state is not None:
                state.ahead = deque()

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
        rule: ChainRule | None = None
        if chain is not None:
            rule = policy.chain_rule(temperature=noise_of(runs[0])) if drafting else of_length(0)
        if chain is not None and rule is not None:
            report = self._draft_chain(runs[0], chain, rule)
            if drafting:
                policy.report(report)
        else:
            self._levels.draft(runs, drafting if self.head is not None else [], policy)
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
        calls = self._compute.calls
        if calls is None or len(runs) != 1 or self._rejection or self._log_evidence:
            return None
        (run,) = runs
        is_plain = (
            run.item.num_known == 1
            and not run.prefetched
            and run.item.live.request.features is None
        )
        return calls.chain if is_plain and chooses_plainly(run) else None

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
        request, temperature = item.live.request, noise_of(run)
        if state.num_lagging >= CATCH_UP_ROWS:
            self._levels.catch_up([run])
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

    def go_ahead(
        self, drafted: DraftedRound, policy: DraftPolicy, *, until: Callable[[], bool]
    ) -> None:
        """Drafts past the end of the draft until the verdict arrives, for a single request."""
        if self._chain_for(drafted.runs) is not None:
            return  # drafting one token at a time takes longer than the next chain
        self._levels.go_ahead(drafted.runs, policy, until=until)

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
