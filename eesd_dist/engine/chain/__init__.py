"""Drafting one request's chain in one compiled call on a CPU."""
