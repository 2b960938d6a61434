"""The engine of a head that one process trains without DeepSpeed: nothing is partitioned.

Has the part of DeepSpeed's engine that `learner` uses. Does not depend on batches or the loss.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eesd_dist.errors import ConfigError

_FILE = "learner.pt"


class TorchEngine:
    """A module and its optimizer, on the device of the module."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, *, accumulation: int, clip: float
    ) -> None:
        self.optimizer = optimizer
        self._module = module
        self._accumulation = accumulation
        self._clip = clip
        self._num_micro_batches = 0

    def __call__(self, *inputs: Any) -> Any:
        return self._module(*inputs)

    def train(self) -> None:
        self._module.train()

    def eval(self) -> None:
        self._module.eval()

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of one micro-batch; a step's gradient is their mean."""
        (loss / self._accumulation).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Updates the weights after the last micro-batch of a step."""
        self._num_micro_batches += 1
        if self._num_micro_batches % self._accumulation:
            return
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, self._clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def zero_optimization_partition_weights(self) -> bool:
        return False

    def save_checkpoint(
        self, folder: str, *, tag: str, client_state: dict[str, Any], **_: object
    ) -> None:
        file = Path(folder) / tag / _FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "module": self._module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "client_state": client_state,
        }
        torch.save(state, file)

    def load_checkpoint(self, folder: str, *, tag: str, **_: object) -> tuple[str, dict[str, Any]]:
        """Raises ConfigError for a checkpoint that DeepSpeed has written."""
        file = Path(folder) / tag / _FILE
        if not file.exists():
            raise ConfigError(
                f"{file.parent}: found a checkpoint of DeepSpeed, which is not installed: pip "
                "install 'eesd-dist[distill]', or train into another folder"
            )
        state = torch.load(file, map_location=_device_of(self._module), weights_only=True)
        self._module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        return str(file), state["client_state"]

    def destroy(self) -> None:
        self.optimizer.zero_grad()


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
