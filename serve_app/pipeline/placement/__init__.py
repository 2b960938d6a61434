"""Where the ranks of a pipeline run: their slots, and the placement groups of these."""
