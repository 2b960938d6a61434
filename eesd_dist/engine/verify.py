"""The verify stage: the target's remaining layers, and the rule that decides every token.

A verify rank has weights and KV pages only: each round's header has the rows, pages and sampling
parameters. It does not depend on requests, queues or controllers.
"""

# Shapes: T rows of a round, S sampled rows, K drafted rows, D hidden size, V vocabulary.

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from eesd_dist.backends.api import RoundVerifier, engine_on
from eesd_dist.config import Numerics
from eesd_dist.engine.recording.row_features import features_of
from eesd_dist.model.attention.rows import RowPlan, RowSegment
from eesd_dist.model.kv_layout import Ints
from eesd_dist.model.layers.paged_layers import LayerRows
from eesd_dist.model.parallel import joined_over_ranks
from eesd_dist.model.rank_memory import logits_block
from eesd_dist.model.span import LlamaSpan
from eesd_dist.sampling.rejection import reject_all
from eesd_dist.sampling.row_rules import RowRule, keeps_logits, rules_of
from eesd_dist.sampling.rule import TokenChoice, choose, joined_choices, silent_choice
from eesd_dist.transport.channel import follow_round, share_close, share_round
from eesd_dist.transport.contracts import (
    RoundHeader,
    RoundSource,
    Segment,
    TensorGroup,
    VerifyReply,
)
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.group_handles import process_group_of
from eesd_dist.transport.transfers import finish_all

_NO_INTS = np.zeros(0, dtype=np.int32)


class VerifyStage:
    """Layers [N, L), final norm and LM head of one tensor-parallel rank."""

    def __init__(
        self,
        *,
        span: LlamaSpan,
        group: TensorGroup,
        page_size: int,
        device: torch.device,
        numerics: Numerics,
        compiles_in_background: bool = False,
    ) -> None:
        """`compiles_in_background`: if the kernel is not cached, work starts without the compiled
        pass, but for a group of ranks."""
        self.span = span
        self.group = group
        self._page_size = page_size
        self._device = device
        self._numerics: Numerics = numerics
        self._verifier = engine_on(device).verifier(
            span, compiles_in_background=compiles_in_background
        )

    @property
    def verifier(self) -> RoundVerifier | None:
        """A pass as one call; None where there is none, and before there is one."""
        return self._verifier.get()

    @torch.inference_mode()
    def verify(
        self, header: RoundHeader, hidden_TD: Tensor, draft_probs_KV: Tensor | None
    ) -> VerifyReply:
        """Returns the target's token after each sampled row; all ranks return the same."""
        started = time.perf_counter()
        self.span.move(header.kv_moves)
        verifier, segments = self.verifier, header.segments
        if verifier is not None and _is_one_pass(header):
            open_rows, verified = _open_rows(segments, verifier), None
            if len(open_rows) <= logits_block(self.span.spec.vocab_size):
                verified = verifier.verify(segments, hidden_TD, open_rows)
            if verified is not None:
                choice = silent_choice(verified.tokens_S)
                if verified.open_rows:
                    rules = _rules_at(verified.open_rows, segments)
                    choice = choice.replaced(
                        verified.open_rows, self._choose(verified.logits_OV, rules)
                    )
                return _reply(header, choice, took_s=time.perf_counter() - started)
        rows = RowPlan.build(
            [
                RowSegment(start=s.start, num_rows=s.num_rows, pages=s.pages, parents=s.parents)
                for s in header.segments
            ],
            page_size=self._page_size,
            device=self._device,
            numerics=self._numerics,
        )
        layer_rows = LayerRows(header.exits) if header.exits else None
        hidden_TD = self.span.forward(
            hidden_TD.to(device=self._device, dtype=self.span.compute_dtype),
            rows,
            layer_rows=layer_rows,
        )
        reply = self._sample(header, hidden_TD, draft_probs_KV, started)
        if not header.top_k:
            return reply
        return replace(
            reply,
            features=features_of(
                header,
                hidden_TD,
                exit_TD={} if layer_rows is None else layer_rows.rows,
                span=self.span,
                group=self.group,
            ),
            verify_s=time.perf_counter() - started,
        )

    def _sample(
        self,
        header: RoundHeader,
        hidden_TD: Tensor,
        draft_probs_KV: Tensor | None,
        started: float,
    ) -> VerifyReply:
        reported = reported_rows(header.segments)
        if not reported:
            return _reply(header, silent_choice(_NO_INTS), took_s=time.perf_counter() - started)
        if len(reported) < hidden_TD.shape[0]:
            hidden_TD = hidden_TD[torch.tensor(reported, device=hidden_TD.device)]
        rules = [rule for segment in header.segments for rule in rules_of(segment)]
        accepted = _NO_INTS
        if header.wants_rejection:
            logits_SV = self.span.logits(hidden_TD)
            choice = self._choose(logits_SV, rules)
            choice, accepted = self._judged(header, logits_SV, draft_probs_KV, rules, choice)
        else:  # a block at a time: the rows of a prompt may be many
            block = logits_block(self.span.spec.vocab_size)
            choices = [
                self._choose(
                    self.span.logits(hidden_TD[first : first + block]),
                    rules[first : first + block],
                )
                for first in range(0, len(rules), block)
            ]
            choice = choices[0] if len(choices) == 1 else joined_choices(choices)
        took_s = time.perf_counter() - started
        return _reply(header, choice, accepted=accepted, took_s=took_s)

    def _choose(self, logits_SV: Tensor, rules: Sequence[RowRule]) -> TokenChoice:
        return choose(logits_SV, rules, group=self.group, vocab_start=self.span.vocab_start)

    def _judged(
        self,
        header: RoundHeader,
        logits_SV: Tensor,
        draft_probs_KV: Tensor | None,
        rules: list[RowRule],
        choice: TokenChoice,
    ) -> "tuple[TokenChoice, np.typing.NDArray[np.int32]]":
        """Returns the choice by rejection sampling, and which drafted tokens survive."""
        if draft_probs_KV is None:  # no drafts: every token is drawn from the target
            draft_probs_KV = logits_SV.new_zeros(0, self.span.spec.vocab_size)
        full_SV = joined_over_ranks(logits_SV, self.group, count=self.span.spec.vocab_size)
        tokens, accepted = self._reject(header.segments, full_SV, draft_probs_KV, rules)
        logprobs = choice.logprobs
        if logprobs.size:  # so far those of the tokens sampled without rejection
            logprobs = _logprobs_of(tokens, full_SV)
        return dataclasses.replace(choice, tokens=tokens, logprobs=logprobs), accepted

    def _reject(
        self,
        segments: tuple[Segment, ...],
        full_SV: Tensor,
        draft_probs_KV: Tensor,
        rules: list[RowRule],
    ) -> "_Judged":
        """Runs rejection sampling over each drafted chain (the published baseline)."""
        drafts = [
            segment.tokens[segment.num_rows - segment.num_sampled + 1 :]
            for segment in segments
            if segment.num_sampled
        ]
        tokens = np.zeros(len(rules), dtype=np.int32)
        accepted = np.zeros(len(rules), dtype=np.int32)
        first = 0
        for draft, verdict in zip(
            drafts, reject_all(full_SV, draft_probs_KV, drafts, rules), strict=True
        ):
            end = first + verdict.num_accepted
            tokens[first:end] = draft[: verdict.num_accepted]
            tokens[end] = verdict.next_token
            accepted[first:end] = 1
            first += len(draft) + 1
        return _Judged(tokens, accepted)


def _is_one_pass(header: RoundHeader) -> bool:
    """Returns whether a round needs nothing but a token after each sampled row."""
    if header.wants_rejection or header.exits or header.top_k:
        return False
    return not any(segment.forced for segment in header.segments)


def _open_rows(segments: Sequence[Segment], verifier: RoundVerifier) -> list[int]:
    """Returns which of the sampled rows the call does not decide."""
    open_rows: list[int] = []
    end = 0
    for segment in segments:
        first, end = end, end + segment.num_sampled
        if not segment.num_sampled or (
            segment.top_logprobs is None
            and (verifier.has_masks or not segment.masks)
            and (verifier.has_filters or not segment.params.is_filtered)
            and keeps_logits(
                segment.params,
                num_generated=segment.start
                + segment.num_rows
                + 1
                - segment.num_sampled
                - segment.num_prompt,
            )
        ):
            continue
        open_rows += range(first, end)
    return open_rows


def _rules_at(rows: Sequence[int], segments: Sequence[Segment]) -> list[RowRule]:
    """Returns the rules of some of the sampled rows, of segments without forced tokens."""
    rules: list[RowRule] = []
    at = end = 0
    for segment in segments:
        first, end = end, end + segment.num_sampled
        if at < len(rows) and rows[at] < end:
            by_row = rules_of(segment)
            while at < len(rows) and rows[at] < end:
                rules.append(by_row[rows[at] - first])
                at += 1
    return rules


def _reply(
    header: RoundHeader, choice: TokenChoice, *, accepted: Ints = _NO_INTS, took_s: float
) -> VerifyReply:
    return VerifyReply(
        round_id=header.round_id,
        tokens=np.asarray(choice.tokens, dtype=np.int32),
        accepted=accepted,
        logprobs=np.asarray(choice.logprobs, dtype=np.float32),
        top_ids=np.asarray(choice.top_ids, dtype=np.int32),
        top_logprobs=np.asarray(choice.top_logprobs, dtype=np.float32),
        verify_s=took_s,
        received_to_sent_s=took_s,
    )


class _Judged(NamedTuple):
    tokens: "np.typing.NDArray[np.int32]"
    accepted: "np.typing.NDArray[np.int32]"


def _logprobs_of(
    tokens: "np.typing.NDArray[np.int32]", full_SV: Tensor
) -> "np.typing.NDArray[np.float32]":
    tokens_S1 = torch.from_numpy(tokens).to(full_SV.device, torch.int64).unsqueeze(-1)
    logprobs_S1 = full_SV.log_softmax(dim=-1).gather(-1, tokens_S1)
    return logprobs_S1.squeeze(-1).cpu().numpy().astype(np.float32)


def reported_rows(segments: tuple[Segment, ...]) -> list[int]:
    """Returns flat indices of the rows in the reply: of each segment the first ones, with forced
    tokens, and the last ones, which are sampled."""
    indices: list[int] = []
    end = 0
    for segment in segments:
        indices.extend(range(end, end + len(segment.forced)))
        end += segment.num_rows
        indices.extend(range(end - segment.num_sampled, end))
    return indices


Observe = Callable[[RoundHeader, float, float], None]
"""Called after every round that a rank has finished, with the Unix times at which it began it and
at which it had its part of the verdict."""


def serve_rounds(
    stage: VerifyStage, source: RoundSource, *, observe: Observe = lambda *_: None
) -> None:
    """Runs rank 0's loop: receives a round, shares it with the other ranks, verifies and replies.

    Returns when the draft stage closes the channel; raises PeerLost when a rank is lost.
    """
    shared = process_group_of(stage.group)
    while True:
        round_message = source.next_round()
        if round_message is None:
            if shared is not None:
                share_close(shared)
            return
        began_unix_s = time.time()
        reply = verify_on_ranks(stage, shared, *round_message)
        ended_unix_s = time.time()
        source.reply(reply)
        observe(round_message[0], began_unix_s, ended_unix_s)


def verify_on_ranks(
    stage: VerifyStage,
    group: ProcessGroup | None,
    header: RoundHeader,
    hidden_TD: Tensor,
    draft_probs_KV: Tensor | None,
) -> VerifyReply:
    """Verifies a round on rank 0, and on the stage's other ranks, which are in `follow_rounds`.

    `group` has them; None without any. Rank 0 computes while the round is still being sent to them.
    Raises PeerLost when one of them is lost.
    """
    if group is None:
        return stage.verify(header, hidden_TD, draft_probs_KV)
    started_s, before = time.perf_counter(), group.counts().total
    sharing = share_round(group, header, hidden_TD, draft_probs_KV)
    reply = stage.verify(header, hidden_TD, draft_probs_KV)
    finish_all(sharing, timeout_s=group.timeout_s)
    group.check()  # an aborted collective leaves garbage instead of raising
    took_s = time.perf_counter() - started_s
    traffic = group.counts().total.since(before)
    return replace(reply, verify_s=took_s, received_to_sent_s=took_s, group=traffic)


def follow_rounds(stage: VerifyStage, *, observe: Observe = lambda *_: None) -> None:
    """Runs the other ranks' loop: the same computation on the same rows."""
    group = process_group_of(stage.group)
    assert group is not None, "a follower is a rank of a process group"
    while (round_message := follow_round(group)) is not None:
        began_unix_s = time.time()
        stage.verify(*round_message)
        ended_unix_s = time.time()
        # No rank waits for what follows the last part: the verdict may be known before the end.
        if began_unix_s <= group.contributed_unix_s:
            ended_unix_s = group.contributed_unix_s
        observe(round_message[0], began_unix_s, ended_unix_s)
