"""The draft stage: embedding, layers [0, N) and the exit head of one pipeline.

Every token of every request, drafted or known, runs through these layers; the verify stage
continues from their hidden states. `choose` says what drafts for which request: one call, or
`levels`. Does not depend on queues, replies, channels or the number of ranks.
"""

# Shapes: T rows, K drafted tokens, D hidden size, V vocabulary.

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eesd_dist.backends.api import ChainDrafter, DraftedChain
from eesd_dist.backends.row_slices import joined
from eesd_dist.config import TreeConfig
from eesd_dist.control.chain_rule import ChainRule, of_length
from eesd_dist.control.policy import DraftPolicy
from eesd_dist.engine.drafting.choose import LevelReason, choose_drafters, fits_one_call
from eesd_dist.engine.drafting.guesses import Guesser, noise_of
from eesd_dist.engine.drafting.levels import CATCH_UP_ROWS, LevelDrafter, chain_start, known_rows
from eesd_dist.engine.drafting.ngrams import Match
from eesd_dist.engine.drafting.ranks import DraftCompute
from eesd_dist.engine.drafting.run import (
    MOST_GIVEN,
    Candidate,
    DraftRun,
    DraftState,
    roll_back,
)
from eesd_dist.engine.masks import ConstrainedText
from eesd_dist.model.heads.exit_head import ExitHead
from eesd_dist.model.span import LlamaSpan
from eesd_dist.schedule.plans import PlanItem, RoundPlan
from eesd_dist.transport.contracts import TensorGroup
from eesd_dist.types import DrafterUse, Evidence, RequestId

_NO_DRAFT = of_length(0)

__all__ = ["Candidate", "DraftRun", "DraftStage", "DraftState", "DraftedRound"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedRound:
    runs: tuple[DraftRun, ...]
    hidden_TD: Tensor
    draft_probs_KV: Tensor | None
    drafters: Mapping[DrafterUse, int]
    """Number of the requests that each drafter drafted for, by the reason."""

    @property
    def guesses_by_depth(self) -> list[int]:
        """Levels of guesses at each depth, over all requests."""
        counts = [run.num_guesses for run in self.runs]
        return [sum(count > depth for count in counts) for depth in range(max(counts, default=0))]


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
        self._log_evidence = log_evidence
        self._rejection = rejection
        self._levels = LevelDrafter(
            compute,
            Guesser(compute, tree=tree or TreeConfig(), rejection=rejection),
            log_evidence=log_evidence,
        )
        self._states: dict[RequestId, DraftState] = {}
        self.constraints: dict[RequestId, ConstrainedText] = {}
        """Constraints of the live requests that have one."""

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
    def drafter(self) -> ChainDrafter | None:
        """The drafting of a round in one call; None where there is none."""
        return self._compute.drafter

    def swap_head(self, head: ExitHead) -> None:
        """Replaces the exit head between two rounds. The new head takes over the old one's keys and
        values: for a head trained further from the old one they are nearly right, and a wrong draft
        changes no text."""
        self._compute.take_head(head)

    def forget(self, request_id: RequestId) -> None:
        self._states.pop(request_id, None)

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
        """Runs the known rows, and drafts what the policy chooses.

        `overlapped`: another microbatch is being verified at the same time.
        """
        runs = [self._open(item) for item in plan.items]
        drafting = [run for run in runs if _may_draft(run)]
        if self.head is not None:
            num_rows = sum(run.item.num_known for run in runs)
            drafting_ids = policy.begin_round(
                [run.request_id for run in drafting],
                overlapped=overlapped,
                num_requests=len(runs),
                num_known=num_rows,
                num_prefill=num_rows - sum(run.item.is_final for run in runs),
                context=plan.context,
            )
            for run in drafting:
                run.rests = run.request_id not in drafting_ids
                if not run.rests:
                    self._look_up(run, policy)
            drafting = [run for run in drafting if not (run.is_lookup or run.rests)]
        else:
            drafting = []
        no_call = self._no_call
        rules, reasons = choose_drafters(drafting, policy, drafter=self.drafter, no_call=no_call)
        drafters = self._uses(rules, reasons)
        at_once: list[DraftRun] = []
        if no_call is None and (rules or not reasons):  # those that draft nothing go with the rules
            at_once = [run for run in runs if run.request_id not in reasons and fits_one_call(run)]
        if len(at_once) == len(runs):
            hidden_TD = self._draft_in_one_call(runs, rules, policy)
            return DraftedRound(
                runs=tuple(runs), hidden_TD=hidden_TD, draft_probs_KV=None, drafters=drafters
            )
        if at_once:
            self._draft_in_one_call(at_once, rules, policy)
        done = {run.request_id for run in at_once}
        by_level = [run for run in drafting if run.request_id not in done]
        self._levels.draft(
            [run for run in runs if run.request_id not in done],
            by_level,
            policy,
        )
        slices = [row_slice for run in runs for row_slice in run.rows_TD]
        probs = [row for run in runs for row in run.probs_V]
        return DraftedRound(
            runs=tuple(runs),
            hidden_TD=joined(slices),
            draft_probs_KV=torch.stack(probs) if probs else None,
            drafters=drafters,
        )

    @property
    def _no_call(self) -> LevelReason | None:
        """Reason why no round of this stage is drafted in one call; None if one may be."""
        if self._log_evidence:
            return "evidence"
        if self._rejection:
            return "rejection"
        return "no_call" if self.drafter is None else None

    def _uses(
        self, rules: Mapping[RequestId, ChainRule], reasons: Mapping[RequestId, LevelReason]
    ) -> Counter[DrafterUse]:
        drafters = Counter(DrafterUse("levels", reason) for reason in reasons.values())
        if rules:
            assert self.drafter is not None
            drafters[DrafterUse(self.drafter.name, "")] = len(rules)
        return drafters

    def _draft_in_one_call(
        self, runs: Sequence[DraftRun], rules: Mapping[RequestId, ChainRule], policy: DraftPolicy
    ) -> Tensor:
        """Returns the rows [T, D] of these requests after the layers."""
        drafter = self._compute.drafter
        assert drafter is not None
        hidden_TD, chains = drafter.draft(
            [
                chain_start(
                    row,
                    rules.get(row.run.request_id, _NO_DRAFT),
                    max_draft=row.run.item.max_draft if row.run.request_id in rules else 0,
                )
                for row in known_rows(runs)
            ]
        )
        lagging: list[DraftRun] = []
        for run, chain in zip(runs, chains, strict=True):
            self._take(run, chain)
            if run.state.num_lagging >= CATCH_UP_ROWS:
                lagging.append(run)
        self._levels.store_lagging(lagging)
        policy.report(
            {
                run.request_id: chain.report
                for run, chain in zip(runs, chains, strict=True)
                if run.request_id in rules
            }
        )
        return hidden_TD

    def _take(self, run: DraftRun, chain: DraftedChain) -> None:
        """Takes over one request's rows and draft."""
        rows_TD, tokens, gaps, report = chain
        if not report.means:
            run.note_known(rows_TD, drafts=True)
            return
        temperature, count = noise_of(run), report.num_drafted
        evidence = [
            Evidence(depth=depth, temperature=temperature, gap=gap)
            for depth, gap in enumerate(gaps[:count])
        ]
        run.take_chain(tokens[:count], evidence, rows_TD, num_guesses=len(tokens))

    def _look_up(self, run: DraftRun, policy: DraftPolicy) -> None:
        """Drafts what followed the text's last tokens before, where that promises more."""
        if run.is_tree or self._rejection:
            return
        matches: list[Match] = []

        def find() -> tuple[int, int]:
            limit = min(run.item.max_draft, MOST_GIVEN)
            match = run.state.ngrams.match(run.item.live.tokens, limit)
            if match is None:
                return 0, 0
            if run.constraint is not None:
                match = match.up_to(run.constraint.num_allowed(match.tokens))
            matches.append(match)
            return match.context, len(match.tokens)

        length = policy.lookup_length(run.request_id, find)
        if length:
            run.look_up(matches[0].tokens[:length])

    def _open(self, item: PlanItem) -> DraftRun:
        request_id = item.live.request.request_id
        state = self._states.setdefault(request_id, DraftState())
        roll_back(state, item.start)
        return DraftRun(item=item, state=state, constraint=self.constraints.get(request_id))

    def settle(self, run: DraftRun, *, path: Sequence[int]) -> list[tuple[int, int]]:
        """Rolls this request's exit-head state back to the accepted part of the draft.

        `path`: the accepted drafted tokens. Returns the KV moves, (from, to) each, that put an
        accepted branch into its KV slots in the text; `move` does them in this stage.
        """
        state, item = run.state, run.item
        if run.is_tree:
            run.keep_branch(path, drafts=self.head is not None)
            return run.moves(path, page_size=self.page_size)
        if self.head is not None and item.live.request.speculation.mode == "auto":
            roll_back(state, item.start + item.num_known + len(path))
        return []

    @torch.inference_mode()
    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Does KV moves in the pages of the layers and of the exit head."""
        self._compute.move(moves)


def _may_draft(run: DraftRun) -> bool:
    item, constraint = run.item, run.constraint
    return item.max_draft > 0 and item.is_final and (constraint is None or constraint.drafts)
