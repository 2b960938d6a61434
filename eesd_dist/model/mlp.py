"""The MLP of a decoder layer."""

from dataclasses import dataclass

from torch import Tensor

from eesd_dist.model.elementwise import Activation
from eesd_dist.model.kernels import Linear


# Shapes: T rows, D hidden channels, I intermediate channels.
@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """down(activation(gate) * up); gate and up are one product."""

    gate_up: Linear
    activation: Activation
    down: Linear

    def __call__(self, x_TD: Tensor) -> Tensor:
        gate_TI, up_TI = self.gate_up(x_TD).chunk(2, dim=-1)
        return self.down(self.activation(gate_TI).mul_(up_TI))
