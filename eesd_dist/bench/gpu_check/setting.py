"""What a section is told, and the table of sections. Imports no torch: the parent stays small."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from eesd_dist.bench.gpu_check.report_rows import Rows

if TYPE_CHECKING:
    import torch

DeviceName = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One section's task."""

    device_name: DeviceName
    model: Path
    """The bundled model, or another checkpoint folder."""
    scratch: Path
    """An empty folder, removed afterwards."""
    seconds: float
    """After this long the section's process is ended."""
    started_s: float = field(default_factory=time.monotonic)

    @property
    def is_small(self) -> bool:
        """The CPU's sizes: they show that the checks work, and prove nothing about a GPU."""
        return self.device_name == "cpu"

    @property
    def left_s(self) -> float:
        return self.seconds - (time.monotonic() - self.started_s)

    def device(self) -> "torch.device":
        """Raises ConfigError where there is none. On a CPU one thread computes, as in an engine
        that is not told otherwise."""
        import torch

        from eesd_dist.engine.build import device_named

        if self.device_name == "cpu":
            torch.set_num_threads(1)
        return device_named(self.device_name)


class SectionModule(Protocol):
    """What the module of a section has."""

    def run(self, setting: Setting, rows: Rows) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One process of the check."""

    name: str
    module: str
    share: float
    """Of the minutes, in proportion to the other sections' shares."""
    needs_cuda: bool = False


_HERE = "eesd_dist.bench.gpu_check.sections"

SECTIONS = (
    Section(name="versions", module=f"{_HERE}.versions", share=2.5),
    Section(name="spans", module=f"{_HERE}.spans", share=1.5),
    Section(name="invariance", module=f"{_HERE}.invariance", share=5.0),
    Section(name="noise", module=f"{_HERE}.noise", share=1.0),
    Section(name="exactness", module=f"{_HERE}.exactness", share=5.0),
    Section(name="nccl", module=f"{_HERE}.nccl", share=1.5),
    Section(name="times", module=f"{_HERE}.times", share=5.0),
    Section(name="pytest", module=f"{_HERE}.pytests", share=1.5, needs_cuda=True),
)
