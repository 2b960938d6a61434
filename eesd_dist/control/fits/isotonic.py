"""Isotonic regression: the nearest non-decreasing sequence.

Pool adjacent violators (Ayer et al. 1955; Barlow et al. 1972): neighbours in the wrong order are
replaced by their weighted mean, until there are none.
"""

from collections.abc import Sequence


def isotonic(values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """Returns the non-decreasing sequence with the least weighted squared distance to `values`."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, number of values
    for value, weight in zip(values, weights or [1.0] * len(values), strict=True):
        block = (float(value), float(weight), 1)
        while blocks and blocks[-1][0] >= block[0]:
            block = _pooled(blocks.pop(), block)
        blocks.append(block)
    return [mean for mean, _, count in blocks for _ in range(count)]


def _pooled(
    left: tuple[float, float, int], right: tuple[float, float, int]
) -> tuple[float, float, int]:
    weight = left[1] + right[1]
    mean = (left[0] * left[1] + right[0] * right[1]) / weight
    return mean, weight, left[2] + right[2]
