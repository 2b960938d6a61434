"""The exit head's guesses after the frontier of each draft, a level at a time.

For a chain one token, for a tree the best ones of each node, drawn with the noise that the verifier
will use. Does not decide which of them to draft, and computes no rows.
"""

# Shapes: A frontier tokens, B alternatives, V vocabulary (or the draft vocabulary).

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eesd_dist.backends.api import ChainDrafter
from eesd_dist.backends.row_slices import joined
from eesd_dist.config import TreeConfig
from eesd_dist.control.tree_growth import Offer
from eesd_dist.engine.drafting.ranks import DraftCompute
from eesd_dist.engine.drafting.run import Candidate, DraftRun
from eesd_dist.sampling.rejection import draft_sample
from eesd_dist.sampling.row_rules import RowRule, is_guessed_by_score
from eesd_dist.sampling.rule import draft_choice, top1_probs
from eesd_dist.types import Evidence


class Guess(NamedTuple):
    """A candidate and its place in its run's draft."""

    run: DraftRun
    parent: int
    rank: int
    candidate: Candidate


class _Drawn(NamedTuple):
    """The exit head's best tokens at A frontier tokens."""

    tokens_AB: list[list[int]]
    scores_AB: list[list[float]]
    gaps_A: list[float]
    probs_AV: Tensor | None


class Guesser:
    """Draws guesses from the exit head's logits."""

    def __init__(self, compute: DraftCompute, *, tree: TreeConfig, rejection: bool) -> None:
        """`tree`: number of alternatives for requests that draft trees."""
        self._compute = compute
        self._tree = tree
        self.rejection = rejection

    def guess(self, runs: Sequence[DraftRun], *, with_probs: bool) -> list[list[Guess]]:
        """Returns guesses for each run, first choices first, up to a tree's room; none where the
        grammar allows no token that the head can guess. The head has read all rows of the runs."""
        exit_rows = [run.exit_AD for run in runs if run.exit_AD is not None]
        assert len(exit_rows) == len(runs)
        logits_AV = self._compute.logits(joined(exit_rows))
        nodes = [(run, node) for run in runs for node in run.frontier]
        rules = [_rule(run, node) for run, node in nodes]
        depths = [run.depth_of(node) for run, node in nodes]
        widths = [
            self._tree.width_at(run.depth_of(run.frontier[0]), run.item.live.tree) for run in runs
        ]
        drawn = self._draw(logits_AV, rules, depths, width=max(widths))
        probs = top1_probs(logits_AV) if with_probs else [1.0] * len(rules)
        evidence = [
            Evidence(
                depth=depth,
                top1_prob=prob,
                temperature=rule.params.noise_temperature,
                gap=gap,
            )
            for depth, prob, rule, gap in zip(depths, probs, rules, drawn.gaps_A, strict=True)
        ]
        guesses: list[list[Guess]] = []
        first = 0
        for run, width in zip(runs, widths, strict=True):
            ours = [
                Guess(run, node, rank, _candidate(drawn, evidence[at], at, rank))
                for rank in range(min(width, len(drawn.tokens_AB[first])))
                for at, node in enumerate(run.frontier, start=first)
                if drawn.scores_AB[at][rank] > -torch.inf
            ]
            guesses.append(ours[: run.room] if run.is_tree else ours)
            first += len(run.frontier)
        return guesses

    def _draw(
        self, logits_AV: Tensor, rules: list[RowRule], depths: list[int], *, width: int
    ) -> _Drawn:
        head = self._compute.head
        assert head is not None
        if self.rejection:
            sample = draft_sample(
                logits_AV,
                rules,
                depths,
                vocab_ids=head.vocab_ids,
                vocab_size=self._compute.span.spec.vocab_size,
            )
            tokens_AB = [[token] for token in sample.tokens.tolist()]
            is_possible = [True] * len(rules)
            if any(rule.mask for rule in rules):
                is_possible = sample.probs.isfinite().all(dim=-1).tolist()
            scores_AB = [[0.0 if possible else -torch.inf] for possible in is_possible]
            return _Drawn(tokens_AB, scores_AB, [0.0] * len(rules), sample.probs)
        width = min(width, logits_AV.shape[-1])
        choice = draft_choice(logits_AV, rules, vocab_ids=head.vocab_ids, width=width)
        return _Drawn(choice.tokens.tolist(), choice.scores.tolist(), choice.gaps.tolist(), None)


def noise_of(run: DraftRun) -> float:
    """Returns the temperature of the request's choices, 0 for greedy ones."""
    return run.item.live.choice_params.noise_temperature


def chooses_plainly(run: DraftRun, drafter: ChainDrafter) -> bool:
    """Returns whether one token is guessed next, by its score as the drafter has it."""
    sampling = run.item.live.request.sampling
    return not run.is_tree and is_guessed_by_score(sampling, has_filters=drafter.has_filters)


def offer_of(guess: Guess) -> Offer:
    """Returns the guess as controllers see it."""
    run, parent, rank, candidate = guess
    return Offer(
        request_id=run.request_id,
        evidence=candidate.evidence,
        parent=parent,
        rank=rank,
        shape=run.item.live.tree,
    )


def _candidate(drawn: _Drawn, evidence: Evidence, at: int, rank: int) -> Candidate:
    return Candidate(
        token=drawn.tokens_AB[at][rank],
        evidence=evidence,
        probs_V=None if drawn.probs_AV is None else drawn.probs_AV[at],
    )


def _rule(run: DraftRun, node: int) -> RowRule:
    """Returns the rule of the token after a node."""
    live = run.item.live
    sampling = live.request.sampling
    return RowRule.of(
        sampling,
        position=run.first_position + run.depth_of(node),
        num_prompt=live.num_prompt,
        history=(*live.tokens, *run.tokens_to(node)) if sampling.needs_history else (),
        mask=run.mask_after(node),
    )
