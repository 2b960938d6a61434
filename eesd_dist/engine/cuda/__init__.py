"""Drafting on a GPU."""
