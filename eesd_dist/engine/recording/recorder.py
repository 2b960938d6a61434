"""Records what verification computes anyway, for training: rows, tokens, the target's best tokens.

Selects the rows of a round that belong to the text, and limits the length of a piece of one text
(OSD, arXiv 2310.07177, trains on such pieces). Of a prompt, the rows that are computed here are
recorded, so that a head is trained and judged in the context of the answer; only for them the
target's best tokens are computed in addition. A `RecorderSink` is passed in to store the pieces;
without one nothing is recorded.
"""

# Shapes: T verified positions of one text, D hidden size, K best tokens.

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from eesd_dist.backends.row_slices import joined
from eesd_dist.engine.acceptance import Accepted
from eesd_dist.engine.drafting.stage import DraftRun
from eesd_dist.engine.recording.text_features import featured
from eesd_dist.transport.contracts import Floats, Ints, RoundHeader, RowFeatures, VerifyReply
from eesd_dist.types import Request, RequestId

MAX_POSITIONS = 512
"""Maximum positions per piece: of a longer text the last ones are kept."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerifiedPiece:
    """Consecutive verified positions of one text, without request id and without text."""

    tokens_T: Ints
    """The token at each row."""
    num_prompt: int
    """Number of tokens that were known: those of the prompt, at least one."""
    hidden_TD: Tensor
    """The rows after the draft stage's layers, on the device that computed them."""
    top_ids_TK: Ints
    """The target's best tokens after each row."""
    top_logprobs_TK: Floats
    """Log-probabilities under the target, before temperature and filters."""
    workload: str
    temperature: float


class RecorderSink(Protocol):
    """Receives pieces and selects the requests to record."""

    @property
    def top_k(self) -> int:
        """Number of the target's best tokens to record per row."""
        ...

    def wants(self, request: Request) -> bool:
        """Returns whether this request is recorded."""
        ...

    def put(self, segment: VerifiedPiece) -> None:
        """Takes a piece or drops it; never blocks and never raises."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerifiedRows:
    """Rows of one request in one round that its verdict confirmed."""

    position: int
    """Position of the first row; the others follow it."""
    tokens: tuple[int, ...]
    hidden_TD: Tensor
    top_ids_TK: Ints
    top_logprobs_TK: Floats

    @property
    def end(self) -> int:
        return self.position + len(self.tokens)

    def first(self, count: int) -> "VerifiedRows":
        return VerifiedRows(
            position=self.position,
            tokens=self.tokens[:count],
            hidden_TD=self.hidden_TD[:count],
            top_ids_TK=self.top_ids_TK[:count],
            top_logprobs_TK=self.top_logprobs_TK[:count],
        )


def verified_rows(
    run: DraftRun, reply: VerifyReply, *, first: int, path: Sequence[int], top_k: int
) -> VerifiedRows:
    """Returns the last known row and the accepted drafted ones. `path`: their indices among the
    drafted rows; `first`: the run's first row in the reply."""
    item = run.item
    last = item.num_known - 1
    index = torch.tensor([last, *(item.num_known + i for i in path)])
    rows_TD = joined(run.rows_TD)
    verdicts = [first, *(first + 1 + i for i in path)]
    return VerifiedRows(
        position=item.start + last,
        tokens=(item.live.tokens[item.start + last], *(run.tokens[i] for i in path)),
        hidden_TD=rows_TD[index.to(rows_TD.device)],
        top_ids_TK=reply.top_ids[verdicts, :top_k].copy(),
        top_logprobs_TK=reply.top_logprobs[verdicts, :top_k].copy(),
    )


def prompt_rows(
    run: DraftRun, features: RowFeatures, *, rows: range, first: int, top_k: int
) -> VerifiedRows:
    """Returns a request's known rows from position `first` on, without the last known token's,
    which has a verdict. `rows`: its known rows in the reply's features."""
    item = run.item
    skipped = first - item.start
    count = item.num_known - item.is_final
    at = slice(rows.start + skipped, rows.start + count)
    return VerifiedRows(
        position=first,
        tokens=tuple(item.live.tokens[first : item.start + count]),
        hidden_TD=run.rows_TD[0].tensor[skipped:count].clone(),
        top_ids_TK=features.top_ids[at, :top_k].copy(),
        top_logprobs_TK=features.top_logits[at, :top_k] - features.lse[at, None],
    )


class _Text:
    """The recorded rows of one request so far."""

    def __init__(self, request: Request) -> None:
        self.num_prompt = len(request.prompt)
        self.workload = request.workload
        self.temperature = request.sampling.temperature
        self.parts: deque[VerifiedRows] = deque()
        self.num_rows = 0
        self.staged: VerifiedRows | None = None
        """This round's rows, until it is known how many of their tokens are emitted."""

    @property
    def next_position(self) -> int | None:
        if not self.parts:
            return None
        return self.parts[-1].end

    def append(self, rows: VerifiedRows) -> None:
        self.parts.append(rows)
        self.num_rows += len(rows.tokens)
        while self.num_rows - len(self.parts[0].tokens) >= MAX_POSITIONS:
            self.num_rows -= len(self.parts.popleft().tokens)

    def piece(self) -> VerifiedPiece:
        """Returns all recorded rows, at most the last MAX_POSITIONS."""
        tokens = [token for chunk in self.parts for token in chunk.tokens][-MAX_POSITIONS:]
        first = self.parts[-1].end - len(tokens)
        return VerifiedPiece(
            tokens_T=np.asarray(tokens, dtype=np.int32),
            num_prompt=min(max(self.num_prompt - first, 1), len(tokens)),
            hidden_TD=torch.cat([chunk.hidden_TD for chunk in self.parts])[-MAX_POSITIONS:],
            top_ids_TK=np.concatenate([p.top_ids_TK for p in self.parts])[-MAX_POSITIONS:],
            top_logprobs_TK=np.concatenate([p.top_logprobs_TK for p in self.parts])[
                -MAX_POSITIONS:
            ],
            workload=self.workload,
            temperature=self.temperature,
        )


class RecorderTap:
    """Collects the rows of an engine's recorded requests and passes them to the sink."""

    def __init__(self, sink: RecorderSink) -> None:
        self._sink = sink
        self._texts: dict[RequestId, _Text] = {}

    def admit(self, request: Request) -> None:
        if request.features is None and self._sink.wants(request):
            self._texts[request.request_id] = _Text(request)

    def top_k(self, request_id: RequestId) -> int:
        """Returns how many best tokens to record per row of this request; 0 if not recorded."""
        return self._sink.top_k if request_id in self._texts else 0

    def wants_prompt(self, run: DraftRun) -> bool:
        """Returns whether a round computes rows to record that get no verdict."""
        text = self._texts.get(run.request_id)
        if text is None:
            return False
        end = run.item.start + run.item.num_known - run.item.is_final
        return end > max(run.item.start, text.next_position or 0)

    def prompt_top_k(self, runs: Iterable[DraftRun]) -> int:
        """Returns how many best tokens to record of each such row; 0 if there is none."""
        return self._sink.top_k if any(self.wants_prompt(run) for run in runs) else 0

    def take_prompts(
        self, runs: Sequence[DraftRun], header: RoundHeader, reply: VerifyReply
    ) -> None:
        """Keeps the rows of prompts. Rows computed again, after a preemption, are known already."""
        if reply.features is None:
            return
        for run, rows in featured(runs, header):
            text = self._texts.get(run.request_id)
            if text is None:
                continue
            first = max(run.item.start, text.next_position or 0)
            verified_rows = prompt_rows(
                run, reply.features, rows=rows, first=first, top_k=self._sink.top_k
            )
            if verified_rows.tokens:
                self._append(text, verified_rows)

    def stage(self, accepted: Iterable[Accepted], reply: VerifyReply) -> None:
        """Stages the rows that a verdict confirmed, until `commit` has the number emitted."""
        for a in accepted:
            text = self._texts.get(a.run.request_id)
            if text is not None:
                text.staged = verified_rows(
                    a.run, reply, first=a.first_row, path=a.path, top_k=self._sink.top_k
                )

    def commit(self, request_id: RequestId, num_left: int) -> None:
        """Keeps the staged rows of the `num_left` emitted tokens, one row per token."""
        text = self._texts.get(request_id)
        if text is None or text.staged is None:
            return
        rows, text.staged = text.staged.first(num_left), None
        self._append(text, rows)

    def _append(self, text: _Text, rows: VerifiedRows) -> None:
        """Appends rows; those after a gap begin another piece."""
        if text.next_position is not None and text.next_position != rows.position:
            self._hand_on(text)
        if rows.tokens:
            text.append(rows)

    def end(self, request_id: RequestId) -> None:
        text = self._texts.pop(request_id, None)
        if text is not None:
            self._hand_on(text)

    def _hand_on(self, text: _Text) -> None:
        if text.parts:
            self._sink.put(text.piece())
            text.parts.clear()
            text.num_rows = 0
