"""Rounds on a GPU: a stage's work in steps and graphs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from eesd_dist.backends.api import ChainDrafter, DeviceMemory, RoundVerifier
from eesd_dist.backends.cuda.uploads import uploaded
from eesd_dist.backends.lazy import LazyCompiled
from eesd_dist.backends.torch.engine import TorchEngine
from eesd_dist.config import DType, Numerics
from eesd_dist.model.heads.exit_head import ExitHead
from eesd_dist.model.span import LlamaSpan


class CudaEngine(TorchEngine):
    """Implements `EngineBackend`."""

    collectives = "cpu:gloo,cuda:nccl"

    @property
    def captured_rows(self) -> Sequence[int]:
        from eesd_dist.backends.cuda.layers import GRAPH_ROWS

        return GRAPH_ROWS

    @property
    def multiplies_bfloat16(self) -> bool:
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))

    def warm_up(self) -> None:
        """Sets float32 products to float32: NVIDIA's images set them to TF32, with results that are
        not those of a CPU."""
        torch.set_float32_matmul_precision("highest")

    def drafter(
        self, span: LlamaSpan, head: ExitHead, *, compiles_in_background: bool
    ) -> LazyCompiled[ChainDrafter]:
        from eesd_dist.backends.cuda.drafter import GraphDrafter

        return LazyCompiled(partial(GraphDrafter.of, span, head), is_ready=True)

    def verifier(
        self, span: LlamaSpan, *, compiles_in_background: bool
    ) -> LazyCompiled[RoundVerifier]:
        from eesd_dist.backends.cuda.verifier import GraphVerifier

        return LazyCompiled(partial(GraphVerifier.of, span), is_ready=True)

    def uploaded(self, numbers: Sequence[int], device: torch.device) -> Tensor:
        return uploaded(numbers, device)

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    @contextmanager
    def own_stream(self, device: torch.device) -> Iterator[None]:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield

    def memory(self, device: torch.device) -> DeviceMemory:
        torch.cuda.empty_cache()  # what the packing of weights has freed counts as free
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total=total, free=free, own=torch.cuda.memory_reserved(device))

    def machine(
        self, device: torch.device, *, dtype: DType, numerics: Numerics, num_threads: int
    ) -> str:
        import triton  # compiles the kernels, and decides the order of their sums

        return f"{torch.cuda.get_device_name(device)}, Triton {triton.__version__}"

    def uuid(self, device: torch.device) -> str:
        return str(torch.cuda.get_device_properties(device).uuid)
