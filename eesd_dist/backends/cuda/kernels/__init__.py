"""Triton kernels of layers, noise and choice. Needs Triton when it is imported."""
