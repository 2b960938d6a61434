"""Drafting level by level: the next tokens of all requests are offered and computed together.

A level is the rows of the tokens taken before and the exit head's guesses after them, for those
requests that the policy wants another guess of. Where it can be, that is one compiled call; else
layers, head, logits and choices are calls of their own. For trees,
alternatives are offered too, each with its ancestors as history and for its noise.
"""

# Shapes: T rows, A frontier tokens.

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from eesd_dist.backends.api import ChainStart
from eesd_dist.backends.row_slices import RowSlice, joined
from eesd_dist.control.chain_rule import REFUSAL, ChainRule
from eesd_dist.control.policy import DraftPolicy
from eesd_dist.engine.drafting.choose import fits_one_call
from eesd_dist.engine.drafting.guesses import Guess, Guesser, chooses_plainly, noise_of, offer_of
from eesd_dist.engine.drafting.ranks import DraftCompute
from eesd_dist.engine.drafting.run import Candidate, DraftRun
from eesd_dist.model.attention.rows import RowSegment
from eesd_dist.model.layers.paged_layers import LayerRows
from eesd_dist.sampling.row_filters import NO_FILTER, filter_of
from eesd_dist.types import Evidence

CATCH_UP_ROWS = 32
"""Number of rows at a time by which the exit head catches up: it lags behind in rounds without
drafts, and stores the keys and values of more rows than these without computing them."""


class FreshRows(NamedTuple):
    """Rows to compute for one request: known ones, drafted ones, or known ones with a lookup."""

    run: DraftRun
    tokens: Sequence[int]
    segment: RowSegment
    num_committed: int


class LevelDrafter:
    """Drafts of any requests, by any rule."""

    def __init__(self, compute: DraftCompute, guesser: Guesser, *, log_evidence: bool) -> None:
        self._compute = compute
        self._guesser = guesser
        self._log_evidence = log_evidence

    def draft(
        self, runs: Sequence[DraftRun], drafting: Sequence[DraftRun], policy: DraftPolicy
    ) -> None:
        """Computes the known rows of all runs, and drafts for those of `drafting` what the policy
        chooses."""
        fresh = list(known_rows(runs))
        active = _worth_guessing(drafting, policy)
        guesses = self._level(fresh, active, policy)
        while active:
            chosen: list[Guess] = []
            for guess, is_chosen in zip(
                guesses, policy.choose([offer_of(guess) for guess in guesses]), strict=True
            ):
                if is_chosen and guess.run.affords(guess.candidate, parent=guess.parent):
                    chosen.append(guess)
            fresh = _append_guesses(chosen)
            going_on = {id(guess.run) for guess in chosen}
            active = _worth_guessing(
                [run for run in active if id(run) in going_on and run.may_grow], policy
            )
            guesses = self._level(fresh, active, policy)

    def catch_up(self, runs: Sequence[DraftRun]) -> None:
        """Runs the exit head over the rows it has not seen; keeps its output at the frontier. Of
        many rows it computes the last one only."""
        many = [run for run in runs if run.state.num_lagging > CATCH_UP_ROWS]
        self.store_lagging(many, num_left=1)
        slices: list[RowSlice] = []
        segments: list[RowSegment] = []
        for run in runs:
            unseen, segment = run.unseen()
            slices.extend(unseen)
            segments.append(segment)
        out_TD = self._compute.run_head(joined(slices), segments)
        end = 0
        for run, segment in zip(runs, segments, strict=True):
            end += segment.num_rows
            run.note_seen(RowSlice(out_TD, end - segment.num_rows, end))

    def store_lagging(self, runs: Sequence[DraftRun], *, num_left: int = 0) -> None:
        """Lets the exit head store the rows that it has not read, but the last ones."""
        if not runs:
            return
        slices, segments = zip(*[run.take_lagging(num_left=num_left) for run in runs], strict=True)
        self._compute.store_head_kv(joined(slices), segments)

    def _level(
        self, fresh: Sequence[FreshRows], active: Sequence[DraftRun], policy: DraftPolicy
    ) -> list[Guess]:
        """Computes the fresh rows. Returns guesses after each active run's frontier, run by run:
        for a chain one or none, for a tree the best ones of each token, first choices first, up to
        the tree's room."""
        with_probs = bool(active) and (
            self._log_evidence
            or any(run.item.live.tree == "dynamic" for run in active)
            or policy.needs_probs([run.request_id for run in active])
        )
        if fresh and self._fits_one_call(fresh, active, with_probs):
            guesses = self._in_one_call(fresh, active)
        else:
            self._compute_rows(fresh)
            guesses = self._guess(active, with_probs=with_probs)
        guessing = {id(run) for run in active}
        for run in active:
            run.num_guesses += 1
        lagging = [
            row.run
            for row in fresh
            if row.run.state.num_lagging >= CATCH_UP_ROWS and id(row.run) not in guessing
        ]
        self.store_lagging(lagging)
        return [guess for level in guesses for guess in level]

    def _fits_one_call(
        self, fresh: Sequence[FreshRows], active: Sequence[DraftRun], with_probs: bool
    ) -> bool:
        drafter, have_rows = self._compute.drafter, {id(row.run) for row in fresh}
        if drafter is None or with_probs or self._guesser.rejection:
            return False
        return all(fits_one_call(row.run) for row in fresh) and all(
            chooses_plainly(run, drafter)
            and id(run) in have_rows
            and (drafter.has_masks or run.constraint is None)
            for run in active
        )

    def _in_one_call(
        self, fresh: Sequence[FreshRows], active: Sequence[DraftRun]
    ) -> list[list[Guess]]:
        drafter, guessing = self._compute.drafter, {id(run) for run in active}
        assert drafter is not None
        starts = [
            chain_start(row, REFUSAL, max_draft=1, mask=row.run.mask_after(row.run.frontier[0]))
            if id(row.run) in guessing
            else chain_start(row, REFUSAL, max_draft=0)
            for row in fresh
        ]
        guesses_of: dict[int, list[Guess]] = {}
        _, chains = drafter.draft(starts)
        for row, (rows_TD, guesses, gaps, _) in zip(fresh, chains, strict=True):
            run = row.run
            self._note_rows(row, rows_TD)
            if not guesses:
                continue
            run.note_read()
            if guesses[0] < 0:  # none of those allowed is in the head's vocabulary
                guesses_of[id(run)] = []
                continue
            evidence = Evidence(depth=len(run.tokens), temperature=noise_of(run), gap=gaps[0])
            candidate = Candidate(token=guesses[0], evidence=evidence, probs_V=None)
            guesses_of[id(run)] = [Guess(run, run.frontier[0], 0, candidate)]
        return [guesses_of[id(run)] for run in active]

    def _compute_rows(self, fresh: Sequence[FreshRows]) -> None:
        if not fresh:
            return
        layer_rows = _rows_to_keep(fresh)
        hidden_TD = self._compute.run_layers(
            [token for row in fresh for token in row.tokens],
            [row.segment for row in fresh],
            layer_rows=layer_rows,
        )
        end = 0
        for row in fresh:
            first, end = end, end + len(row.tokens)
            self._note_rows(row, RowSlice(hidden_TD, first, end))
            if layer_rows is not None and row.num_committed:
                committed = slice(first, first + row.num_committed)
                row.run.exit_TD = {
                    layer: x_TD[committed] for layer, x_TD in layer_rows.rows.items()
                }

    def _note_rows(self, row: FreshRows, rows_TD: RowSlice) -> None:
        """Passes the rows to their run."""
        if not row.num_committed:
            row.run.note_level(rows_TD)
            return
        row.run.note_known(rows_TD, drafts=self._compute.head is not None)

    def _guess(self, runs: Sequence[DraftRun], *, with_probs: bool) -> list[list[Guess]]:
        """Draws the exit head's next tokens for each run, with the noise the verifier will use."""
        lagging = [run for run in runs if run.is_unseen]
        if lagging:
            self.catch_up(lagging)
        return self._guesser.guess(runs, with_probs=with_probs) if runs else []


def chain_start(
    row: FreshRows, rule: ChainRule, *, max_draft: int, mask: bytes = b""
) -> ChainStart:
    """Returns a request's part of a compiled call: rows to compute, and tokens to draft after them.
    `mask`: of the first."""
    if not max_draft:
        return ChainStart(row.tokens, row.segment, 0, rule)
    run = row.run
    sampling = run.item.live.request.sampling
    return ChainStart(
        row.tokens,
        row.segment,
        max_draft,
        rule,
        run.state.lagging_TD,
        noise_of(run),
        sampling.seed,
        mask,
        filter_of(sampling) if sampling.is_narrow else NO_FILTER,
    )


def _worth_guessing(runs: Sequence[DraftRun], policy: DraftPolicy) -> list[DraftRun]:
    """Returns the runs for which the policy wants another guess; other drafts end here."""
    if not runs:
        return []
    request_ids = policy.worth_a_guess([run.request_id for run in runs])
    return [run for run in runs if run.request_id in request_ids]


def known_rows(runs: Sequence[DraftRun]) -> Iterator[FreshRows]:
    """Yields the rows before each draft, with those of a lookup."""
    for run in runs:
        item = run.item
        tokens = [*item.live.tokens[item.start : item.start + item.num_known], *run.tokens]
        segment = RowSegment(item.start, len(tokens), item.pages)
        yield FreshRows(run, tokens, segment, item.num_known)


def _append_guesses(guesses: Sequence[Guess]) -> list[FreshRows]:
    """Appends the taken guesses to their drafts. Returns the rows to compute, grouped by run."""
    fresh: dict[int, tuple[DraftRun, list[int]]] = {}
    for run, parent, rank, candidate in guesses:
        fresh.setdefault(id(run), (run, []))[1].append(candidate.token)
        run.append(candidate, parent=parent, rank=rank)
    return [FreshRows(run, tokens, run.last_rows(len(tokens)), 0) for run, tokens in fresh.values()]


def _rows_to_keep(fresh: Sequence[FreshRows]) -> LayerRows | None:
    specs = [row.run.item.live.request.features for row in fresh if row.num_committed]
    exits = {layer for spec in specs if spec is not None for layer in spec.exits}
    return LayerRows(exits) if exits else None
