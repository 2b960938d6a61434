"""Decides how long to keep drafting, from counts and evidence, never tensors."""
