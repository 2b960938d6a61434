"""Watches every operator that torch runs, with its input and output tensors."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OperatorWatch(TorchDispatchMode):
    """Runs operators unchanged; subclasses record what they look for."""

    def saw(
        self, operator: Callable[..., Any], inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        raise NotImplementedError

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.ran(func, args, kwargs or {}, out)
        return out

    def ran(
        self,
        operator: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: object,
    ) -> None:
        """Called after an operator."""
        self.saw(operator, _tensors((args, kwargs)), _tensors(out))


def _tensors(tree: object) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]
