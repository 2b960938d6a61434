"""Settings of a section, and the table of sections. Imports no torch: the parent stays small."""

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
    """Settings of one section."""

    device_name: DeviceName
    model: Path
    """The bundled model, or another checkpoint folder."""
    scratch: Path
    """An empty folder, removed afterwards."""
    seconds: float
    """Time limit after which the section's process is killed."""
    started_s: float = field(default_factory=time.monotonic)

    @property
    def is_small(self) -> bool:
        """True to use small sizes, as on a CPU, where only the checks themselves are tested."""
        return self.device_name == "cpu"

    @property
    def left_s(self) -> float:
        return self.seconds - (time.monotonic() - self.started_s)

    def device(self) -> "torch.device":
        """Returns the device. Raises ConfigError if there is none. On a CPU torch is set to one
        thread, the engine's default."""
        import torch

        from eesd_dist.engine.build import device_named

        if self.device_name == "cpu":
            torch.set_num_threads(1)
        return device_named(self.device_name)


class SectionModule(Protocol):
    """Interface of a section's module."""

    def run(self, setting: Setting, rows: Rows) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Section of the checks, which runs in one process."""

    name: str
    module: str
    share: float
    """Share of the minutes, relative to the other sections' shares."""
    needs_cuda: bool = False


_HERE = "eesd_dist.bench.gpu_check.sections"

SECTIONS = (
    Section(name="versions", module=f"{_HERE}.versions", share=2.5),
    Section(name="spans", module=f"{_HERE}.spans", share=1.5),
    Section(name="invariance", module=f"{_HERE}.invariance", share=5.0),
    Section(name="noise", module=f"{_HERE}.noise", share=1.0),
    Section(name="exactness", module=f"{_HERE}.exactness", share=5.0),
    Section(name="nccl", module=f"{_HERE}.nccl", share=1.5),
    Section(name="pages", module=f"{_HERE}.pages", share=1.0),
    Section(name="times", module=f"{_HERE}.times", share=5.0),
    Section(name="pytest", module=f"{_HERE}.pytests", share=1.5, needs_cuda=True),
)
