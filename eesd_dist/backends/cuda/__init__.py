"""Backend of GPUs: kernels that Triton compiles, and CUDA graphs."""

from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eesd_dist.backends.cuda.engine import CudaEngine
    from eesd_dist.backends.cuda.model import CudaModel
    from eesd_dist.backends.cuda.sampling import CudaSampling


class CudaBackend:
    """Implements `devices.Backend`. A part is imported when it is used first."""

    @cached_property
    def sampling(self) -> "CudaSampling":
        from eesd_dist.backends.cuda.sampling import CudaSampling

        return CudaSampling()

    @cached_property
    def model(self) -> "CudaModel":
        from eesd_dist.backends.cuda.model import CudaModel

        return CudaModel()

    @cached_property
    def engine(self) -> "CudaEngine":
        from eesd_dist.backends.cuda.engine import CudaEngine

        return CudaEngine()


BACKEND = CudaBackend()
