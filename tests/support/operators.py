"""Every operator that torch runs, and the tensors it took and made."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OperatorWatch(TorchDispatchMode):
    """Runs operators as they are; a subclass notes what it looks for."""

    def saw(self, operator: Callable[..., Any], taken: list[Tensor], made: list[Tensor]) -> None:
        raise NotImplementedError

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.saw(func, _tensors((args, kwargs)), _tensors(out))
        return out


def _tensors(tree: object) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]
