"""Protocols of the engine's part of a backend: a round's work as one call, memory, uploads."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eesd_dist.backends.lazy import LazyCompiled
from eesd_dist.backends.row_slices import RowSlice
from eesd_dist.config import DType, Numerics
from eesd_dist.control.chain_rule import ChainReport, ChainRule
from eesd_dist.devices import backend_of
from eesd_dist.model.attention.rows import RowSegment
from eesd_dist.model.heads.exit_head import ExitHead
from eesd_dist.model.span import LlamaSpan
from eesd_dist.sampling.row_filters import NO_FILTER
from eesd_dist.transport.contracts import Segment


# Shapes: T rows, D hidden channels, S sampled rows, O open ones, V columns of this rank.
class ChainStart(NamedTuple):
    """A request of a round: its known rows, and how to draft after them."""

    tokens: Sequence[int]
    """Tokens of the known rows."""
    segment: RowSegment
    """The known rows."""
    max_draft: int
    """Tokens to draft at most; 0: the exit head does not run, and the rest has no meaning."""
    rule: ChainRule
    lagging: Sequence[RowSlice] = ()
    """The head's inputs of the rows before the known ones that it has not read yet."""
    temperature: float = 0.0
    """0: greedy."""
    seed: int = 0
    mask: bytes = b""
    """The tokens that may be guessed; empty: any. Only where one guess is made at most."""
    filters: tuple[int, float, float] = NO_FILTER
    """Filters of each guess, as `RowFilters` has them."""


class DraftedChain(NamedTuple):
    """Results of one request."""

    rows_TD: RowSlice
    """The known rows, and one of each drafted token."""
    tokens: list[int]
    """The drafted tokens; after them the guess that ended the draft, if one did; -1 for a guess of
    which the mask leaves none."""
    gaps: list[float]
    """Score gap of each of them."""
    report: ChainReport


class ChainDrafter(Protocol):
    """Layers [0, N) and the exit head of one rank. One call at a time; every rank of a group makes
    the same calls."""

    name: str
    """Name in the statistics of rounds."""
    has_masks: bool
    """True if guesses may have a mask."""

    @property
    def has_filters(self) -> bool:
        """True if guesses may have filters."""
        ...

    @property
    def is_usable(self) -> bool:
        """False in an epoch in which the ranks of a group sum by messages, between two calls."""
        ...

    def draft(self, chains: Sequence[ChainStart]) -> tuple[Tensor, list[DraftedChain]]:
        """Runs all known rows, and drafts after them. Returns the rows [T, D] after the layers,
        request by request, and each request's results."""
        ...


class Verified(NamedTuple):
    """Results of a pass."""

    tokens_S: npt.NDArray[np.int32]
    """The target's token after each sampled row; without meaning after open ones."""
    open_rows: Sequence[int]
    """Sampled rows that the rule decides, by their index among all of them, ascending: those asked
    for, and others that the call could not decide."""
    logits_OV: Tensor
    """This rank's float32 logits after these rows."""


class RoundVerifier(Protocol):
    """Layers [N, L), LM head and rule of one rank. One call at a time."""

    has_masks: bool
    """True if choices by score may have a mask."""

    @property
    def has_filters(self) -> bool:
        """True if choices by score may have filters."""
        ...

    def verify(
        self, segments: Sequence[Segment], hidden_TD: Tensor, open_rows: Sequence[int]
    ) -> Verified | None:
        """Runs a pass; None for rows that this call cannot take. Tokens are chosen by their score
        alone, from among all that the masks leave.

        `open_rows`: as in `Verified`, those asked for.
        """
        ...


class DeviceMemory(NamedTuple):
    """Memory of a device in bytes."""

    total: int
    free: int
    own: int
    """Bytes that this process has reserved."""


class EngineBackend(Protocol):
    """Part of a backend that the engine uses."""

    compiles_kernels: bool
    """True if kernels take so long to compile that a process of its own does it ahead."""
    collectives: str
    """Backends of torch.distributed, of a group of tensors on the device and on the host."""

    @property
    def captured_rows(self) -> Sequence[int]:
        """Ascending numbers of rows of the passes that it captures; none where it captures none."""
        ...

    @property
    def multiplies_bfloat16(self) -> bool:
        """True if this machine has instructions for it."""
        ...

    def warm_up(self) -> None:
        """Prepares this process before it loads weights: settings of libraries, kernels of the
        rule, which take seconds to compile."""
        ...

    def drafter(
        self, span: LlamaSpan, head: ExitHead, *, compiles_in_background: bool
    ) -> LazyCompiled[ChainDrafter]:
        """Returns layers and head as one call for a round, where this machine and stage have it.
        `compiles_in_background`: if it is not compiled yet, work of a single rank starts without
        it."""
        ...

    def verifier(
        self, span: LlamaSpan, *, compiles_in_background: bool
    ) -> LazyCompiled[RoundVerifier]:
        """Returns a verify stage as one call, where this machine and this span have it."""
        ...

    def uploaded(self, numbers: Sequence[int], device: torch.device) -> Tensor:
        """Returns int64 numbers on the device, without a wait for what is queued there."""
        ...

    def synchronize(self, device: torch.device) -> None:
        """Waits until the device has done all that is queued."""
        ...

    def own_stream(self, device: torch.device) -> AbstractContextManager[None]:
        """Queues the work of a thread after that of earlier rounds, and lets no later round wait
        for it."""
        ...

    def memory(self, device: torch.device) -> DeviceMemory | None:
        """Returns the memory of the device, after what is not used was given back; None if it is
        the host's."""
        ...

    def machine(
        self, device: torch.device, *, dtype: DType, numerics: Numerics, num_threads: int
    ) -> str:
        """Returns what decides the last bits of numbers besides torch and the model."""
        ...

    def uuid(self, device: torch.device) -> str:
        """Returns the identity of the device, by which two processes know that they share it;
        empty for the host."""
        ...


def engine_on(device: torch.device) -> EngineBackend:
    """Returns what the engine asks of a device."""
    backend: EngineBackend = backend_of(device).engine
    return backend
