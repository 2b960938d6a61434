"""The shape of a drafted tree: which drafted token follows which.

A tree is a list of parents: token i follows token `parents[i]`, where -1 is the last known token.
A parent always comes before its children.
"""

from collections.abc import Sequence

ROOT = -1
"""The parent of the first drafted tokens: the last known token."""


def depths_of(parents: Sequence[int]) -> list[int]:
    """Returns the depth of each drafted token: the drafted tokens on its path, itself included."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return depths


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Returns the drafted tokens on the path to `node`, itself included; none for the root."""
    path: list[int] = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    path.reverse()
    return path


def is_chain(parents: Sequence[int]) -> bool:
    """Returns whether every token follows the one before it."""
    return all(parent == node - 1 for node, parent in enumerate(parents))


def first_misplaced(parents: Sequence[int]) -> int | None:
    """Returns the first token with a parent that neither comes before it nor is the root."""
    return next((i for i, parent in enumerate(parents) if not ROOT <= parent < i), None)
