"""Time of messages and sums between ranks, from a link's figures or from measured times.

Ranks of a group are placed node by node: a group of more ranks than a node has GPUs crosses nodes.
"""

from dataclasses import dataclass

from cluster.link_figures import CollectiveFigures, Operation, Scope
from cluster.planning.presets import COLLECTIVE_S, LINKS, Link
from eesd_dist.control.cost import interpolated
from eesd_dist.transport.counts import WHOLE_BYTES, bytes_of_sum

_FLOAT32_TO_16_BITS = 2
"""A node's sum is not rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Links inside a node and between nodes."""

    intra: Link = LINKS["nvlink"]
    inter: Link = LINKS["infiniband"]
    gpus_per_node: int = 8
    collective_s: float = COLLECTIVE_S
    measured: tuple[CollectiveFigures, ...] = ()
    """Take precedence over the links' figures."""

    def sum_s(self, size_bytes: int, num_ranks: int) -> float:
        """Returns the seconds of one all-reduce of a tensor of this size."""
        if num_ranks == 1:
            return 0.0
        figures = self._nearest("all_reduce", num_ranks)
        if figures is None:
            return self._computed_sum_s(size_bytes, num_ranks)
        measured_s = interpolated(figures.times, size_bytes)
        if figures.num_ranks == num_ranks:
            return measured_s
        ratio = self._computed_sum_s(size_bytes, num_ranks)
        return measured_s * ratio / self._computed_sum_s(size_bytes, figures.num_ranks)

    def message_s(self, size_bytes: int, *, crosses: bool) -> float:
        """Returns the seconds of one message between two ranks, one way."""
        figures = self._nearest("sendrecv", self.gpus_per_node + 1 if crosses else 2)
        if figures is not None:
            return interpolated(figures.times, size_bytes)
        link = self.inter if crosses else self.intra
        return link.hop_s + size_bytes / link.bytes_per_s

    def _nearest(self, operation: Operation, num_ranks: int) -> CollectiveFigures | None:
        """Returns the figures of the operation in the same scope with the closest rank count."""
        scope: Scope = "nodes" if self.crosses(num_ranks) else "node"
        fitting = [
            figures
            for figures in self.measured
            if figures.operation == operation and figures.scope == scope and figures.times
        ]
        return min(fitting, key=lambda figures: abs(figures.num_ranks - num_ranks), default=None)

    def crosses(self, num_ranks: int) -> bool:
        """Returns whether a group of so many ranks is on several nodes."""
        return num_ranks > self.gpus_per_node

    def _computed_sum_s(self, size_bytes: int, num_ranks: int) -> float:
        """Ranks of a node read each other's numbers; a large tensor is summed in shares, which they
        write into each other's memory. Nodes exchange their sums. Where nodes have no part of the
        sum to themselves (`transport.rank_sums`), all ranks exchange their numbers in a ring."""
        if not self.crosses(num_ranks):
            num_steps = 2 if size_bytes <= WHOLE_BYTES else 4
            moved = bytes_of_sum(size_bytes, size=num_ranks)
            return self._start_s(num_steps * self.intra.hop_s, moved / self.intra.bytes_per_s)
        per_node = self.gpus_per_node
        num_nodes, remaining = divmod(num_ranks, per_node)
        sharing = per_node if self.inter.is_of_node else 1
        if remaining or per_node & (per_node - 1) or per_node == 1:
            return self._ring_s(size_bytes, num_ranks, sharing=sharing)
        moved = size_bytes * (per_node - 1)
        node_s = self._start_s(2 * self.intra.hop_s, moved / self.intra.bytes_per_s)
        wide_bytes = _FLOAT32_TO_16_BITS * size_bytes
        crossing = sharing * bytes_of_sum(wide_bytes, size=num_nodes)
        hops_s = (num_nodes - 1) * self.inter.hop_s
        num_exchanges = 2 if num_nodes > 2 and wide_bytes > WHOLE_BYTES else 1
        exchanges_s = num_exchanges * self._start_s(hops_s, 0.0)
        return node_s + exchanges_s + crossing / self.inter.bytes_per_s

    def _ring_s(self, size_bytes: int, num_ranks: int, *, sharing: int) -> float:
        """A ring that gathers what the ranks add; for a large tensor twice, with shares."""
        per_node = self.gpus_per_node
        num_nodes = -(-num_ranks // per_node)
        hops_s = (num_ranks - num_nodes) * self.intra.hop_s + (num_nodes - 1) * self.inter.hop_s
        moved = bytes_of_sum(size_bytes, size=num_ranks)
        crossing = sharing * moved * (num_ranks - per_node) / (num_ranks - 1)
        bytes_s = max(moved / self.intra.bytes_per_s, crossing / self.inter.bytes_per_s)
        num_exchanges = 1 if size_bytes <= WHOLE_BYTES else 2
        return num_exchanges * self._start_s(hops_s, 0.0) + bytes_s

    def _start_s(self, hops_s: float, bytes_s: float) -> float:
        return self.collective_s + hops_s + bytes_s
