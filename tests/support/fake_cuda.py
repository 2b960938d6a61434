"""Tensors on cuda:0 without a GPU: shapes, types and devices are computed, values are not.

Uses torch's FakeTensorMode. Operations that its Python bindings refuse in a build for the CPU
(indexing and `copy_`) call the underlying operators. `HostCopies` records every operator that
copies a tensor from the GPU to the CPU; operations that need a value (`item`, `bool`) raise an
error.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from eesd_dist.backends.cuda import attention as cuda_attention
from eesd_dist.backends.cuda import choice, graphs, product, rows
from eesd_dist.model.attention.page_views import keys_in
from eesd_dist.model.attention.pages import LayerPages
from tests.support.operators import OperatorWatch

GPU = torch.device("cuda", 0)


class HostCopies(OperatorWatch):
    """Records the operators that run inside its block."""

    def __init__(self) -> None:
        super().__init__()
        self.num_operators = 0
        self.to_the_host: list[str] = []

    def saw(
        self, operator: Callable[..., Any], inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        self.num_operators += 1
        if any(x.is_cuda for x in inputs) and any(not x.is_cuda for x in outputs):
            self.to_the_host.append(str(operator))


class _Bindings(TorchFunctionMode):
    """Runs indexing, `copy_` and `contiguous` of tensors on the GPU through their operators."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].is_cuda:
            if func is Tensor.__getitem__:
                return _indexed(args[0], args[1])
            if func is Tensor.__setitem__:
                torch.ops.aten.copy_.default(_indexed(args[0], args[1]), args[2])
                return None
            if func is Tensor.copy_:
                return torch.ops.aten.copy_.default(*args)
            if func is Tensor.contiguous and not args[0].is_contiguous():
                return args[0].clone(memory_format=torch.contiguous_format)
        return func(*args, **(kwargs or {}))


def _indexed(x: Tensor, index: object) -> Tensor:
    aten, dim = torch.ops.aten, 0
    for key in index if isinstance(index, tuple) else (index,):
        if key is None:
            x, dim = aten.unsqueeze(x, dim), dim + 1
        elif isinstance(key, slice):
            x = aten.slice(x, dim, key.start, key.stop, key.step or 1)
            dim += 1
        elif isinstance(key, int):
            x = aten.select(x, dim, key)
        else:
            raise NotImplementedError(f"indexing a fake tensor with {type(key).__name__}")
    return x


class NoLaunch:
    """A kernel that is not launched: tensors without values have no memory."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_, **__: None


_NO_LAUNCH = NoLaunch()


class _Rerun:
    """A twin of a CUDA graph that runs its work again."""

    def __init__(self, pool: object) -> None: ...

    def capture(self, work: Callable[[], Tensor]) -> int:
        self.replay = work
        return 0


def as_on_gpu(pages: LayerPages) -> None:
    """Makes pages on the CPU stored and attended as on a GPU."""
    shape = pages.shape
    pages.attention = cuda_attention.CudaAttention(pages.pages_PKX, shape)
    pages.keys_PKES = keys_in(
        pages.pages_PKX, head_dim=shape.head_dim, page_size=shape.page_size, form="keys by slot"
    )


@contextmanager
def fake_cuda(kernel: Any = _NO_LAUNCH, graph: Any = _Rerun) -> Iterator[None]:
    """`kernel`: stands for every kernel; `graph`: for the class of graphs."""
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        _Bindings(),
        patch.object(cuda_attention, "attend_kernel", kernel),
        patch.object(cuda_attention, "merge_kernel", kernel),
        patch.object(cuda_attention, "store_kernel", kernel),
        patch.object(rows, "norm_kernel", kernel),
        patch.object(rows, "activation_kernel", kernel),
        patch.object(product, "product_kernel", kernel),
        patch.object(product, "descriptor_product_kernel", kernel),
        patch.object(choice, "gumbel_kernel", kernel),
        patch.object(choice, "block_kernel", kernel),
        patch.object(choice, "best_kernel", kernel),
        patch.object(graphs, "Graph", graph),
        patch.object(cuda_attention, "checked_tiles", lambda *_: True),
    ):
        yield
