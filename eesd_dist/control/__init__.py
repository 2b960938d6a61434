"""Draft-length control: decides how long to draft, from counts and evidence, never tensors."""

from eesd_dist.control.belief import Belief
from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.cost import CostModel

__all__ = ["Belief", "Calibrator", "CostModel"]
