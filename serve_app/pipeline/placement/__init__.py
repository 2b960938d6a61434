"""Placement of the ranks of a pipeline: their slots, and the placement groups of these."""
