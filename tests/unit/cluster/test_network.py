import pytest

from cluster.link_figures import CollectiveFigures
from cluster.planning.network import Network
from cluster.planning.presets import LINKS, Link
from eesd_dist.control.cost import interpolated

TIMES = ((1_000, 10e-6), (3_000, 20e-6), (5_000, 18e-6), (9_000, 58e-6))


@pytest.mark.parametrize(
    ("size_bytes", "expected_us"),
    [(0, 10), (1_000, 10), (2_000, 15), (4_000, 20), (7_000, 38), (13_000, 98)],
)
def test_times_between_two_sizes_are_interpolated(size_bytes: int, expected_us: float) -> None:
    assert interpolated(TIMES, size_bytes) == pytest.approx(expected_us * 1e-6)


def _figures(num_ranks: int, *, scope: str = "node", seconds: float = 1e-3) -> CollectiveFigures:
    return CollectiveFigures(
        operation="all_reduce",
        scope="nodes" if scope == "nodes" else "node",
        num_ranks=num_ranks,
        backend="nccl",
        times=((1_000, seconds), (2_000, 2 * seconds)),
    )


def test_a_sum_takes_longer_with_more_ranks_with_more_bytes_and_between_nodes() -> None:
    network = Network()
    assert network.sum_s(1_000, 1) == 0.0
    by_ranks = [network.sum_s(16_384, ranks) for ranks in (2, 4, 8)]
    assert by_ranks == sorted(by_ranks)
    by_bytes = [network.sum_s(size, 8) for size in (1_000, 100_000, 300_000, 3_000_000)]
    assert by_bytes == sorted(by_bytes)
    slow = Network(inter=LINKS["ethernet-25"])
    assert network.sum_s(16_384, 8) < network.sum_s(16_384, 16) < slow.sum_s(16_384, 16)


def test_ranks_of_one_node_share_its_ethernet_port() -> None:
    unshared = Network(inter=Link(hop_s=0.0, bytes_per_s=1e9), gpus_per_node=8)
    shared = Network(inter=Link(hop_s=0.0, bytes_per_s=1e9, is_of_node=True), gpus_per_node=8)
    size = 200_000
    ratio = (shared.sum_s(size, 16) - unshared.sum_s(size, 16)) / (2 * size / 1e9)
    assert ratio == pytest.approx(7.0, rel=1e-6)


def test_nodes_exchange_one_sum_each_where_they_have_a_part_of_it_to_themselves() -> None:
    network = Network(
        intra=Link(hop_s=0.0, bytes_per_s=1e12),
        inter=Link(hop_s=0.0, bytes_per_s=1e9),
        collective_s=0.0,
        gpus_per_node=4,
    )
    size = 10_000
    assert network.sum_s(size, 16) == pytest.approx(2 * 3 * size / 1e9, rel=0.01)
    assert network.sum_s(size, 6) == pytest.approx(2 * size / 1e9, rel=0.01)  # a ring


def test_measured_sums_are_used_as_they_are_for_as_many_ranks() -> None:
    network = Network(measured=(_figures(4), _figures(8, seconds=2e-3)))
    assert network.sum_s(1_500, 4) == pytest.approx(1.5e-3)
    assert network.sum_s(1_500, 8) == pytest.approx(3e-3)


def test_measured_sums_of_other_ranks_are_scaled_as_the_links_say() -> None:
    computed = Network()
    measured = Network(measured=(_figures(8),))
    scaled = measured.sum_s(1_000, 2)
    expected = 1e-3 * computed.sum_s(1_000, 2) / computed.sum_s(1_000, 8)
    assert scaled == pytest.approx(expected)


def test_figures_inside_a_node_say_nothing_about_sums_between_nodes() -> None:
    network = Network(measured=(_figures(8),))
    assert network.sum_s(1_000, 16) == Network().sum_s(1_000, 16)
    across = Network(measured=(_figures(8), _figures(16, scope="nodes", seconds=5e-3)))
    assert across.sum_s(1_000, 16) == pytest.approx(5e-3)


def test_a_message_between_nodes_takes_the_slower_link() -> None:
    network = Network()
    assert network.message_s(1 << 20, crosses=False) < network.message_s(1 << 20, crosses=True)
    figures = CollectiveFigures(
        operation="sendrecv", scope="nodes", num_ranks=2, backend="gloo", times=((1, 4e-3),)
    )
    measured = Network(measured=(figures,))
    assert measured.message_s(5, crosses=True) == 4e-3
    assert measured.message_s(5, crosses=False) == network.message_s(5, crosses=False)
