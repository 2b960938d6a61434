"""Rounds without a call of their own: stages run layer by layer, and draft level by level."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from eesd_dist.backends.api import ChainDrafter, DeviceMemory, RoundVerifier
from eesd_dist.backends.lazy import LazyCompiled
from eesd_dist.config import DType, Numerics
from eesd_dist.model.heads.exit_head import ExitHead
from eesd_dist.model.span import LlamaSpan


class TorchEngine:
    """Implements `EngineBackend` on any device that shares the host's memory."""

    compiles_kernels = False
    collectives = "gloo"

    @property
    def captured_rows(self) -> Sequence[int]:
        return ()

    @property
    def multiplies_bfloat16(self) -> bool:
        return False

    def warm_up(self) -> None:
        """Does nothing."""

    def drafter(
        self, span: LlamaSpan, head: ExitHead, *, compiles_in_background: bool
    ) -> LazyCompiled[ChainDrafter]:
        return LazyCompiled.without()

    def verifier(
        self, span: LlamaSpan, *, compiles_in_background: bool
    ) -> LazyCompiled[RoundVerifier]:
        return LazyCompiled.without()

    def uploaded(self, numbers: Sequence[int], device: torch.device) -> Tensor:
        return torch.tensor(numbers, device=device)

    def synchronize(self, device: torch.device) -> None:
        """Does nothing: work is done when its call returns."""

    def own_stream(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    def memory(self, device: torch.device) -> DeviceMemory | None:
        return None

    def machine(
        self, device: torch.device, *, dtype: DType, numerics: Numerics, num_threads: int
    ) -> str:
        return device.type

    def uuid(self, device: torch.device) -> str:
        return ""
