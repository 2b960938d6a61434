"""Twins of CUDA graphs on a CPU, with kernels in Triton's interpreter.

What is launched during a capture is launched again by each replay, with the same tensors: Python
code between the launches does not run again, as with a CUDA graph. No kernel runs during a capture.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from eesd_dist.backends.cpu.packed import PackedProduct
from eesd_dist.backends.cuda import graphs
from tests.support.operators import OperatorWatch

Launch = Callable[[str], object]
_RUN = InterpretedFunction.run
_PRODUCT = PackedProduct.after_norm
_THREAD = threading.local()


class RecordedGraph:
    """Implements the methods of `graphs.Graph`."""

    def __init__(self, pool: object) -> None:
        self._launches: list[Launch] = []
        self.num_cuts = 0

    def capture(self, work: Callable[[], Any]) -> int:
        _THREAD.launches = self._launches
        try:
            with _Operators(self._launches):
                self._out = work()
        finally:
            _THREAD.launches = None
        return 0

    def cut(self, exchange: Callable[..., None], *tensors: Tensor) -> None:
        self.num_cuts += 1
        self._launches.append(lambda operation: exchange(*tensors, operation=operation))

    def replay(self, operation: str = "") -> Any:
        for launch in self._launches:
            launch(operation)
        return self._out


class NoRoom(RecordedGraph):
    """A graph that the memory of its GPU has no room for."""

    def capture(self, work: Callable[[], Any]) -> int:
        raise torch.OutOfMemoryError("no room")


class _Operators(OperatorWatch):
    """Records torch's operators, which run to make their outputs; what they write to is kept."""

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        written = [
            arg
            for arg, argument in zip(args, func._schema.arguments, strict=False)
            if argument.is_write and isinstance(arg, Tensor)
        ]
        contents = [x.clone() for x in written]
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for x, content in zip(written, contents, strict=True):
            x.copy_(content)
        return out

    def ran(
        self,
        operator: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: object,
    ) -> None:
        def run_again(_: str) -> None:
            fresh = operator(*args, **kwargs)
            for x, y in zip(tree_leaves(out), tree_leaves(fresh), strict=True):
                if isinstance(x, Tensor) and x.data_ptr() != y.data_ptr():
                    x.copy_(y)

        self._launches.append(run_again)


def launch(run: Callable[[], object]) -> None:
    """Runs this now, or in each replay of the graph that this thread captures."""
    launches = _launches()
    if launches is None:
        run()
    else:
        launches.append(lambda _: run())


def _launches() -> list[Launch] | None:
    """Returns the launches of the graph that this thread captures."""
    launches: list[Launch] | None = getattr(_THREAD, "launches", None)
    return launches


@contextmanager
def recorded_graphs(kind: type[RecordedGraph] = RecordedGraph) -> Iterator[None]:
    """Encloses work with graphs."""

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        launch(partial(_RUN, kernel, *args, **kwargs))

    with (
        patch.object(graphs, "Graph", kind),
        patch.object(InterpretedFunction, "run", run),
        patch.object(PackedProduct, "after_norm", _product),
    ):
        yield


def _product(packed: PackedProduct, *args: Any) -> Tensor:
    """Computes a compiled product, which stands for one of a GPU: its rows have no padding."""
    with _disable_current_modes():
        out: Tensor = _PRODUCT(packed, *args).contiguous()
    launches = _launches()
    if launches is not None:
        launches.append(lambda _: out.copy_(_PRODUCT(packed, *args)))
    return out
