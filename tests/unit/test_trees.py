"""Trees, given by the parents of their nodes."""

from hypothesis import given
from hypothesis import strategies as st

from eesd_dist.trees import depths_of, first_misplaced, is_chain, path_to


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    return [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, 14)))]


@given(parents=trees())
def test_a_path_goes_from_the_root_to_its_end_by_parents(parents: list[int]) -> None:
    for node in range(len(parents)):
        path = path_to(parents, node)
        assert path[-1] == node
        assert [parents[at] for at in path] == [-1, *path[:-1]]
        assert depths_of(parents)[node] == len(path)
    assert path_to(parents, -1) == []


def test_a_chain_is_the_one_tree_in_which_each_follows_the_last() -> None:
    assert is_chain([])
    assert is_chain([-1, 0, 1])
    assert not is_chain([-1, -1])
    assert not is_chain([-1, 0, 0])


def test_a_parent_ahead_of_its_child_or_below_the_root_is_found() -> None:
    assert first_misplaced([-1, 0, -1, 2]) is None
    assert first_misplaced([-1, 1]) == 1
    assert first_misplaced([0]) == 0
    assert first_misplaced([-1, -2]) == 1
