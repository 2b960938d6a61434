"""A CPU backend without the calls of whole rounds or of whole passes, as a reference for them."""

from collections.abc import Iterator
from contextlib import contextmanager

from eesd_dist.backends.cpu import BACKEND
from eesd_dist.backends.cpu.compiled_model import CompiledModel
from eesd_dist.backends.cpu.engine import CpuEngine
from eesd_dist.backends.cpu.model import CpuModel
from eesd_dist.backends.cpu.sampling import CpuSampling
from eesd_dist.devices import replaced_backend
from eesd_dist.model.layers.paged_layers import LayerStack


class _StepwiseModel(CompiledModel):
    def fused_layers(self, stack: LayerStack) -> None:
        return None


class _Cpu:
    def __init__(
        self,
        *,
        sampling: CpuSampling | None = None,
        model: CpuModel | None = None,
        engine: CpuEngine | None = None,
    ) -> None:
        self.sampling = sampling or BACKEND.sampling
        self.model = model or BACKEND.model
        self.engine = engine or BACKEND.engine


@contextmanager
def stepwise_rounds() -> Iterator[None]:
    """Builds engines that draft level by level, and verify layers, LM head and choice by calls of
    their own."""
    with replaced_backend("cpu", _Cpu(sampling=CpuSampling(), engine=CpuEngine())):
        yield


@contextmanager
def stepwise_layers() -> Iterator[None]:
    """Loads layers that are computed one after the other."""
    with replaced_backend("cpu", _Cpu(model=_StepwiseModel(), engine=CpuEngine())):
        yield


@contextmanager
def without_numba() -> Iterator[None]:
    """Loads layers as on a machine without Numba."""
    with replaced_backend(
        "cpu", _Cpu(sampling=CpuSampling(), model=CpuModel(), engine=CpuEngine())
    ):
        yield
