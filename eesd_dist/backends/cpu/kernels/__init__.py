"""Functions for Numba: layers, LM heads, noise, choice, whole drafts and verify passes."""
