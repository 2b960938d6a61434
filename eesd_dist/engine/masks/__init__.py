"""Masks of the live requests: made in the round loop while they cost little, else in threads."""

from eesd_dist.engine.masks.masks import Masks
from eesd_dist.engine.masks.text import ConstrainedText

__all__ = ["ConstrainedText", "Masks"]
