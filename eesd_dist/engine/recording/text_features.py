"""Features of whole texts, prompts included: what a head is trained, calibrated and evaluated on.

A request that wants features is computed like any other, without drafts and without cached pages,
so that every row of its text passes through all layers once. Its hidden states after the wanted
layers, and the target's best tokens, leave with its last token: the text is the same as without
them, and nothing is written to a disk here. Memory is reserved at admission, so that what a text
keeps never grows beyond the limit in the middle of it.
"""

# Shapes: T rows of a text, R rows of one request in one round, D hidden size, K best tokens.

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eesd_dist.engine.drafting.run import DraftRun
from eesd_dist.errors import CapacityError, RequestError
from eesd_dist.transport.contracts import Floats, Ints, RoundHeader, RowFeatures, VerifyReply
from eesd_dist.types import Emission, FeatureSpec, Request, RequestId

MAX_BYTES = 2**30
"""Maximum size of the features that one engine keeps at a time."""
MAX_TOP_K = 1024


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextFeatures:
    """The features of one text. Row t is about the token after token t; the last token, after which
    nothing was computed, has no row."""

    request_id: RequestId
    tokens: tuple[int, ...]
    """T + 1 tokens: the prompt and what was generated."""
    hidden: dict[int, Tensor]
    """Exit layer -> [T, D] as they were computed, on the CPU."""
    top_ids_TK: Ints
    top_logits_TK: Floats
    lse_T: Floats
    """Log-sum-exp over the whole vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureLimits:
    """Limits of the features that one engine can return."""

    split: int
    """First layer of the verify stage."""
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    """Type in which hidden states are computed."""
    max_bytes: int = MAX_BYTES

    def size_of(self, request: Request) -> int:
        """Returns the bytes that a request's features take at most."""
        spec = request.features
        if spec is None:
            return 0
        num_rows = len(request.prompt) + request.sampling.max_tokens
        row_bytes = self.dtype.itemsize * self.hidden_size
        return num_rows * (row_bytes * len(spec.exits) + 8 * spec.top_k + 4)

    def check(self, request: Request) -> None:
        """Raises RequestError for features that no request can have here."""
        spec = request.features
        if spec is None:
            return
        if request.speculation.mode != "off" or request.generated:
            raise RequestError(
                "a text with features is generated from its prompt without drafts: set "
                "speculation.mode to off",
                param="features",
            )
        if list(spec.exits) != sorted(set(spec.exits)) or not all(
            0 < layer < self.num_layers for layer in spec.exits
        ):
            raise RequestError(
                f"features after layers {list(spec.exits)}: expected layers from 1 to "
                f"{self.num_layers - 1}, ascending",
                param="features",
            )
        limit = min(MAX_TOP_K, self.vocab_size)
        if not 0 < spec.top_k <= limit:
            raise RequestError(
                f"features with {spec.top_k} best tokens: expected 1 to {limit}", param="features"
            )
        if self.size_of(request) > self.max_bytes:
            raise RequestError(
                f"features of {self.size_of(request)} bytes: expected at most {self.max_bytes} for "
                "one text; take fewer exits, or shorter texts",
                param="features",
            )


class _Text:
    """The rows of one request so far."""

    def __init__(self, request: Request, spec: FeatureSpec, *, size_bytes: int) -> None:
        self.request_id = request.request_id
        self.spec = spec
        self.size_bytes = size_bytes
        self.num_rows = 0
        self._hidden: dict[int, list[Tensor]] = {layer: [] for layer in spec.exits}
        self._top_ids: list[Ints] = []
        self._top_logits: list[Floats] = []
        self._lse: list[Floats] = []

    def append(self, hidden: dict[int, Tensor], features: RowFeatures, *, rows: range) -> None:
        """`hidden`: the rows alone; `features`: a round's features, with the rows among them."""
        at, top_k = slice(rows.start, rows.stop), self.spec.top_k
        for layer, x_RD in hidden.items():
            self._hidden[layer].append(x_RD.cpu())
        self._top_ids.append(features.top_ids[at, :top_k])
        self._top_logits.append(features.top_logits[at, :top_k])
        self._lse.append(features.lse[at])
        self.num_rows += len(rows)

    def whole(self, tokens: Sequence[int]) -> TextFeatures:
        assert self.num_rows == len(tokens) - 1, "every row of a text is computed"
        return TextFeatures(
            request_id=self.request_id,
            tokens=tuple(tokens),
            hidden={layer: torch.cat(blocks) for layer, blocks in self._hidden.items()},
            top_ids_TK=np.concatenate(self._top_ids),
            top_logits_TK=np.concatenate(self._top_logits),
            lse_T=np.concatenate(self._lse),
        )


class FeatureTap:
    """Collects the rows of an engine's requests that want features."""

    def __init__(self, limits: FeatureLimits) -> None:
        self._limits = limits
        self._texts: dict[RequestId, _Text] = {}
        self._kept_bytes = 0
        """Memory reserved for texts that have not ended."""

    def check(self, request: Request) -> None:
        """Raises RequestError for features that cannot be, CapacityError where there is no room for
        them now."""
        self._limits.check(request)
        if self._kept_bytes + self._limits.size_of(request) > self._limits.max_bytes:
            raise CapacityError(
                f"features of {len(self._texts)} texts are kept, with room for "
                f"{self._limits.max_bytes} bytes: ask for fewer texts at a time"
            )

    def admit(self, request: Request) -> None:
        if request.features is not None:
            text = _Text(request, request.features, size_bytes=self._limits.size_of(request))
            self._kept_bytes += text.size_bytes
            self._texts[request.request_id] = text

    def end(self, request_id: RequestId) -> None:
        text = self._texts.pop(request_id, None)
        if text is not None:
            self._kept_bytes -= text.size_bytes

    def exits_and_top_k(self, runs: Sequence[DraftRun]) -> tuple[tuple[int, ...], int]:
        """Returns what the verify stage has to add to its reply: exits, and best tokens per row."""
        specs = [spec for run in runs if (spec := run.item.live.request.features) is not None]
        exits = {layer for spec in specs for layer in spec.exits if layer > self._limits.split}
        return tuple(sorted(exits)), max((spec.top_k for spec in specs), default=0)

    def take(self, runs: Sequence[DraftRun], header: RoundHeader, reply: VerifyReply) -> None:
        """Takes a round's rows."""
        if reply.features is None:
            return
        for run, rows in featured(runs, header):
            text = self._texts.get(run.request_id)
            if text is not None:
                self._append(text, run, header, reply.features, rows=rows)

    def _append(
        self, text: _Text, run: DraftRun, header: RoundHeader, features: RowFeatures, *, rows: range
    ) -> None:
        spec = text.spec
        num_repeated = text.num_rows - run.item.start  # computed before a preemption
        new = rows[num_repeated:]
        hidden = {
            layer: self._verified(features.hidden[header.exits.index(layer)], new)
            if layer > self._limits.split
            else self._drafted(layer, run)[num_repeated:]
            for layer in spec.exits
        }
        text.append(hidden, features, rows=new)

    def _verified(self, hidden_RD: Floats, rows: range) -> Tensor:
        return torch.from_numpy(hidden_RD[rows.start : rows.stop]).to(self._limits.dtype)

    def _drafted(self, layer: int, run: DraftRun) -> Tensor:
        """Returns a request's known rows after a layer of the draft stage."""
        rows_RD = run.rows_TD[0].tensor if layer == self._limits.split else run.exit_TD[layer]
        return rows_RD[: run.item.num_known]

    def finished(
        self, emissions: Sequence[Emission], runs: Sequence[DraftRun]
    ) -> list[TextFeatures]:
        """Returns the features of the texts that have ended in this round."""
        over = {emission.request_id for emission in emissions if emission.finish_reason is not None}
        return [
            self._texts[run.request_id].whole(run.item.live.tokens)
            for run in runs
            if run.request_id in over and run.request_id in self._texts
        ]


def featured(runs: Sequence[DraftRun], header: RoundHeader) -> Iterator[tuple[DraftRun, range]]:
    """Yields the requests of a round with features in its reply, and their known rows there."""
    start = 0
    for run, segment in zip(runs, header.segments, strict=True):
        if segment.wants_features:
            yield run, range(start, start + run.item.num_known)
            start += segment.num_rows
