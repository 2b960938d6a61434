"""Measures the links of a cluster, and judges them."""
