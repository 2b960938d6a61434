"""Sums over the ranks of one node in each other's memory, which CUDA graphs can hold."""
