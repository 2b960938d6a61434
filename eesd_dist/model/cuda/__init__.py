"""Triton kernels of a layer's parts on a GPU. Needs Triton when it is imported."""
