"""Counts the CUDA graphs that this process has captured.

A capture takes longer than a round, so that the time of a round with one says nothing about others.
"""


class Captures:
    """The number of captures so far."""

    def __init__(self) -> None:
        self.count = 0


CAPTURES = Captures()
