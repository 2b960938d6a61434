"""Computes the verdicts of a round: which drafted tokens of each request are accepted.

Compares the drafts of a round with the verifier's tokens. Also collects the log-probabilities of
prompts, chunk by chunk, which are emitted with the first token: a request that wants them is
computed without cached pages, so that every row of its prompt passes through the verify stage; each
row that precedes a token of the prompt reports that token, as if the target had chosen it.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile

from msgspec import structs

from eesd_dist.engine.drafting.stage import DraftRun
from eesd_dist.schedule.plans import Committed, PlanItem
from eesd_dist.transport.contracts import RoundHeader, Segment, VerifyReply
from eesd_dist.trees import ROOT
from eesd_dist.types import (
    Branch,
    Emission,
    Outcome,
    Request,
    RequestId,
    TokenId,
    TokenLogprobs,
    Value,
)


class Accepted(Value, frozen=True, kw_only=True):
    """The verdict on one request's draft."""

    run: DraftRun
    first_row: int
    """The request's first row among the sampled rows of the reply."""
    path: tuple[int, ...]
    """The accepted drafted tokens, as indices into the draft, from the root on."""
    committed: Committed

    @property
    def next_token(self) -> TokenId:
        """The verifier's token after the accepted ones."""
        return self.committed.tokens[-1]

    @property
    def outcome(self) -> Outcome | None:
        """The outcome that controllers learn from; None for a request that does not speculate, or
        rests."""
        if self.run.rests or self.run.item.live.request.speculation.mode != "auto":
            return None
        run = self.run
        return Outcome(
            request_id=run.request_id,
            num_drafted=len(run.tokens),
            num_accepted=len(self.path),
            evidence=() if run.is_tree else tuple(run.evidence),
            is_lookup=run.is_lookup,
            branches=_branches(run, self.path) if run.is_tree else (),
        )


def accepted_drafts(
    runs: Sequence[DraftRun], segments: Sequence[Segment], reply: VerifyReply
) -> Iterator[Accepted]:
    """Yields the verdict on every run that samples; of a draft the longest agreeing branch is
    accepted."""
    tokens: list[TokenId] = reply.tokens.tolist()
    flags: list[int] = reply.accepted.tolist()
    at = 0
    for run, segment in zip(runs, segments, strict=True):
        at += len(segment.forced)
        if not run.item.is_final:
            continue
        k = len(run.tokens)
        chosen = tokens[at : at + k + 1]
        path = _accepted_path(run, chosen, flags[at : at + k])
        rows = (0, *(1 + node for node in path)) if run.is_tree else range(len(path) + 1)
        yield Accepted(
            run=run,
            first_row=at,
            path=path,
            committed=Committed(
                tokens=tuple(map(chosen.__getitem__, rows)),
                num_drafted=k,
                num_accepted=len(path),
                logprobs=_logprobs(run.item, reply, at, rows),
                failure=None if run.constraint is None else run.constraint.failure,
            ),
        )
        at += k + 1


def _accepted_path(run: DraftRun, chosen: Sequence[int], flags: Sequence[int]) -> tuple[int, ...]:
    """Returns the accepted drafted tokens, from the root on. `chosen`: the verifier's tokens after
    the last known row and after each drafted one; `flags`: verdicts of rejection sampling, empty
    with other rules."""
    if flags:
        return tuple(range(flags.index(0) if 0 in flags else len(flags)))
    if not run.is_tree:
        agreeing = takewhile(lambda pair: pair[0] == pair[1], zip(run.tokens, chosen, strict=False))
        return tuple(range(sum(1 for _ in agreeing)))
    path: list[int] = []
    last = ROOT
    for node, parent in enumerate(run.parents):
        if parent == last and run.tokens[node] == chosen[1 + last]:
            path.append(node)
            last = node
    return tuple(path)


def _branches(run: DraftRun, path: Sequence[int]) -> tuple[Branch, ...]:
    """Returns the nodes of a tree that the verdict reached and that have children."""
    branches: list[Branch] = []
    for depth, point in enumerate((ROOT, *path)):
        children = [node for node, parent in enumerate(run.parents) if parent == point]
        if children:
            branches.append(
                Branch(
                    depth=depth,
                    num_offered=len(children),
                    chosen_rank=run.ranks[path[depth]] if depth < len(path) else -1,
                    evidence=run.evidence[children[0]],
                )
            )
    return tuple(branches)


def _logprobs(
    item: PlanItem, reply: VerifyReply, first: int, rows: Sequence[int]
) -> tuple[TokenLogprobs, ...]:
    """Returns log-probabilities of the committed tokens, at `rows` after the first; empty if the
    request did not ask."""
    num_top = item.live.request.sampling.top_logprobs
    if num_top is None:
        return ()
    return logprobs_at([first + row for row in rows], reply, num_top=num_top)


def logprobs_at(
    rows: Sequence[int], reply: VerifyReply, *, num_top: int
) -> tuple[TokenLogprobs, ...]:
    """Returns the log-probabilities of these rows of a reply."""
    return tuple(
        TokenLogprobs(
            logprob=float(reply.logprobs[row]),
            top=tuple(
                (TokenId(int(i)), float(v))
                for i, v in zip(
                    reply.top_ids[row][:num_top], reply.top_logprobs[row][:num_top], strict=True
                )
            ),
        )
        for row in rows
    )


class PromptLogprobs:
    """Prompt log-probabilities of an engine's requests that have no token yet."""

    def __init__(self) -> None:
        self._collected: dict[RequestId, list[TokenLogprobs]] = {}

    def admit(self, request: Request) -> None:
        if request.wants_prompt_logprobs:
            self._collected[request.request_id] = []

    def end(self, request_id: RequestId) -> None:
        self._collected.pop(request_id, None)

    def take(self, runs: Sequence[DraftRun], header: RoundHeader, reply: VerifyReply) -> None:
        """Takes a round's rows; those computed again, after a preemption, are known already."""
        first = 0
        for run, segment in zip(runs, header.segments, strict=True):
            collected = self._collected.get(run.request_id)
            if collected is not None and segment.forced:
                num_top = run.item.live.request.sampling.prompt_logprobs or 0
                num_collected = len(collected) - run.item.start
                rows = range(first + num_collected, first + len(segment.forced))
                collected += logprobs_at(rows, reply, num_top=num_top)
            first += segment.num_reported

    def attached(self, emissions: Sequence[Emission]) -> list[Emission]:
        """Returns the emissions, the first one of each request with what was collected."""
        return [
            structs.replace(emission, prompt_logprobs=tuple(collected))
            if (collected := self._collected.pop(emission.request_id, None)) is not None
            else emission
            for emission in emissions
        ]
