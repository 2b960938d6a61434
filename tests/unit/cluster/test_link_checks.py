from dataclasses import replace

import pytest

from cluster.preflight.link_checks import (
    LinkLimits,
    LinkTime,
    MeasuredLink,
    check_links,
    figures_of,
)
from cluster.preflight.link_runs import pairs

LIMITS = LinkLimits(slow_factor=3.0, max_latency_us=None, min_bandwidth_gbps=None)


def _link(*nodes: str, us: float, large_us: float = 5000.0, num_ranks: int = 2) -> MeasuredLink:
    """Messages of 4 KiB take `us`, those of 1 MiB `large_us`."""
    return MeasuredLink(
        nodes=nodes,
        num_ranks=num_ranks,
        backend="gloo",
        source="torch",
        times=tuple(
            LinkTime(operation="sendrecv", size_bytes=size, typical_us=2 * time, fastest_us=time)
            for size, time in ((4096, us), (2**20, large_us))
        ),
        num_wrong=0,
    )


def test_equal_links_are_fine() -> None:
    links = [_link("a", "b", us=100), _link("a", "c", us=120), _link("b", "c", us=90)]
    assert check_links(links, LIMITS) == []


def test_one_slow_link_is_named_with_what_is_usual() -> None:
    links = [_link("a", "b", us=100), _link("a", "c", us=20_000), _link("b", "c", us=120)]
    (finding,) = check_links(links, LIMITS)
    assert finding.nodes == ("a", "c")
    assert finding.message == (
        "a - c is slow: sendrecv of 4 KiB takes 20.000 ms at best, 0.100 ms on the other links "
        "(median); up to 3 times that expected"
    )


def test_all_links_of_a_slow_node_are_named() -> None:
    links = [_link("a", "b", us=100), _link("a", "c", us=20_000), _link("b", "c", us=20_000)]
    assert [finding.nodes for finding in check_links(links, LIMITS)] == [("a", "c"), ("b", "c")]


def test_a_link_of_little_bandwidth_is_slow_at_its_large_messages() -> None:
    links = [
        _link("a", "b", us=100),
        _link("a", "c", us=100, large_us=90_000),
        _link("b", "c", us=100),
    ]
    (finding,) = check_links(links, LIMITS)
    assert "sendrecv of 1 MiB takes 90.000 ms" in finding.message


def test_a_difference_that_a_busy_host_makes_is_none() -> None:
    links = [_link("a", "b", us=100), _link("a", "c", us=900), _link("b", "c", us=100)]
    assert check_links(links, LIMITS) == []


def test_links_of_other_kinds_are_not_compared() -> None:
    links = [
        _link("a", us=10),
        _link("b", us=12),
        _link("a", "b", us=9_000),
        _link("a", "b", "c", us=30_000, num_ranks=3),
    ]
    assert check_links(links, LIMITS) == []


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (replace(LIMITS, max_latency_us=50), "4 KiB take 0.100 ms one way at best, at most 0.050"),
        (replace(LIMITS, min_bandwidth_gbps=1.0), "1 MiB move at 0.210 GB/s at best, at least 1"),
    ],
)
def test_a_single_link_is_held_against_the_limits(limits: LinkLimits, expected: str) -> None:
    (finding,) = check_links([_link("a", "b", us=100), _link("a", us=5000)], limits)
    assert finding.nodes == ("a", "b")
    assert expected in finding.message


def test_wrong_values_are_an_error_of_the_link() -> None:
    (finding,) = check_links([replace(_link("a", "b", us=100), num_wrong=7)], LIMITS)
    assert finding.message == "a - b: 7 elements arrived with a wrong value (gloo)"


def test_the_better_of_two_measurements_counts() -> None:
    first, second = _link("a", "b", us=900, large_us=4000), _link("a", "b", us=100, large_us=5000)
    best = first.best_of(replace(second, num_wrong=1))
    assert [time.fastest_us for time in best.times] == [100, 4000]
    assert [time.typical_us for time in best.times] == [200, 8000]
    assert best.num_wrong == 1


def test_figures_are_those_of_a_typical_link() -> None:
    links = [_link("a", "b", us=100), _link("a", "c", us=300), _link("b", "c", us=110)]
    (figures,) = figures_of(links)
    assert (figures.operation, figures.scope, figures.backend) == ("sendrecv", "nodes", "gloo")
    assert figures.times == ((4096, pytest.approx(220e-6)), (2**20, pytest.approx(10_000e-6)))


def test_few_nodes_are_measured_by_pairs_and_many_in_a_ring() -> None:
    assert pairs(["a", "b", "c"]) == [("a", "b"), ("a", "c"), ("b", "c")]
    many = [f"n{i}" for i in range(9)]
    assert len(pairs(many)) == 9
    assert pairs(many)[-1] == ("n8", "n0")
    assert pairs(["a"]) == []
