"""Rounds on a CPU: a stage's work as one compiled call, where there is a compiler."""

import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from eesd_dist.backends.api import ChainDrafter, RoundVerifier
from eesd_dist.backends.lazy import LazyCompiled
from eesd_dist.backends.torch.engine import TorchEngine
from eesd_dist.config import DType, Numerics
from eesd_dist.model.heads.exit_head import ExitHead
from eesd_dist.model.kernels import LinearPacker
from eesd_dist.model.span import LlamaSpan

T = TypeVar("T")

_CPU_INFO = Path("/proc/cpuinfo")


class CpuEngine(TorchEngine):
    """Implements `EngineBackend`."""

    @property
    def multiplies_bfloat16(self) -> bool:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())

    def machine(
        self, device: torch.device, *, dtype: DType, numerics: Numerics, num_threads: int
    ) -> str:
        capability = torch.backends.cpu.get_cpu_capability()
        products = LinearPacker(dtype=dtype, numerics=numerics, device=device).products
        return f"{_cpu_model()}, {capability}, products {products}, {num_threads} threads"


class CompiledEngine(CpuEngine):
    """Draft and verify stages as one call each."""

    compiles_kernels = True

    def warm_up(self) -> None:
        from eesd_dist.backends.cpu.kernels import best_two

        best_two.warm_up()

    def drafter(
        self, span: LlamaSpan, head: ExitHead, *, compiles_in_background: bool
    ) -> LazyCompiled[ChainDrafter]:
        from eesd_dist.backends.cpu.drafter import RoundDrafter
        from eesd_dist.backends.cpu.kernels.draft import is_draft_cached

        return _compiled(
            partial(RoundDrafter.of, span, head),
            is_cached=is_draft_cached,
            in_background=compiles_in_background,
            num_ranks=span.num_ranks,
        )

    def verifier(
        self, span: LlamaSpan, *, compiles_in_background: bool
    ) -> LazyCompiled[RoundVerifier]:
        from eesd_dist.backends.cpu.kernels.verify import is_verify_cached
        from eesd_dist.backends.cpu.verifier import Verifier

        return _compiled(
            partial(Verifier.of, span),
            is_cached=is_verify_cached,
            in_background=compiles_in_background,
            num_ranks=span.num_ranks,
        )


def _compiled(
    make: Callable[[], T | None],
    *,
    is_cached: Callable[[], bool],
    in_background: bool,
    num_ranks: int,
) -> LazyCompiled[T]:
    """Returns `ahead.compile_when_cached`; a group waits until the kernel is there, since its ranks
    make the same calls."""
    from eesd_dist.backends.cpu.ahead import compile_when_cached, wait_for

    if num_ranks > 1:
        wait_for(is_cached)
    is_needed = num_ranks > 1 or not in_background
    return compile_when_cached(make, is_cached=is_cached, is_needed=is_needed)


def _cpu_model() -> str:
    """Returns the CPU model, by which linear algebra libraries choose their routines."""
    lines = _CPU_INFO.read_text().splitlines() if _CPU_INFO.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
