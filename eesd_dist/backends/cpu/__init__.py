"""Backend of CPUs: kernels that Numba compiles, and NumPy where it is faster than torch.

Without Numba, as on a GPU machine that only compares, a CPU has what libraries do, for
`numerics: fast` alone.
"""

from functools import cached_property
from typing import TYPE_CHECKING

from eesd_dist.backends.cpu.compiled import can_compile

if TYPE_CHECKING:
    from eesd_dist.backends.cpu.engine import CpuEngine
    from eesd_dist.backends.cpu.model import CpuModel
    from eesd_dist.backends.cpu.sampling import CpuSampling


class CpuBackend:
    """Implements `devices.Backend`. A part is imported when it is used first."""

    @cached_property
    def sampling(self) -> "CpuSampling":
        from eesd_dist.backends.cpu.sampling import CompiledSampling, CpuSampling

        return CompiledSampling() if can_compile() else CpuSampling()

    @cached_property
    def model(self) -> "CpuModel":
        if can_compile():
            from eesd_dist.backends.cpu.compiled_model import CompiledModel

            return CompiledModel()
        from eesd_dist.backends.cpu.model import CpuModel

        return CpuModel()

    @cached_property
    def engine(self) -> "CpuEngine":
        from eesd_dist.backends.cpu.engine import CompiledEngine, CpuEngine

        return CompiledEngine() if can_compile() else CpuEngine()


BACKEND = CpuBackend()
