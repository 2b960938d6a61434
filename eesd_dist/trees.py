"""The form of a draft that branches: which drafted token follows which.

A tree is a list of parents: token i follows token `parents[i]`, -1 being the last known token, and
a parent always comes before its children. Knows neither tokens nor scores nor pages.
"""

from collections.abc import Sequence

ROOT = -1
"""The parent of the first drafted tokens: the last token that is known."""


def depths_of(parents: Sequence[int]) -> list[int]:
    """How many drafted tokens lie on the way to each, itself included."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return depths


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """The drafted tokens from the root to `node`, both ends included; none for the root itself."""
    path: list[int] = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    path.reverse()
    return path


def is_chain(parents: Sequence[int]) -> bool:
    """Whether every token follows the one before it."""
    return all(parent == node - 1 for node, parent in enumerate(parents))


def first_misplaced(parents: Sequence[int]) -> int | None:
    """The first token whose parent neither comes before it nor is the root."""
    return next((i for i, parent in enumerate(parents) if not ROOT <= parent < i), None)


def runs_of(parents: Sequence[int]) -> list[list[int]]:
    """The tree as chains: every token in exactly one, each chain begun where the tree branches.

    A chain goes on with the first child of its last token; other children begin one of their own.
    """
    run_of: dict[int, list[int]] = {}
    runs: list[list[int]] = []
    for node, parent in enumerate(parents):
        run = run_of.pop(parent, None)
        if run is None:
            run = []
            runs.append(run)
        run.append(node)
        run_of[node] = run
    return runs
