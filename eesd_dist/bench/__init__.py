"""Decides what is measured and against what; every figure carries its recipe."""
