"""Data that an engine keeps of a round besides tokens: rows of texts for training."""
