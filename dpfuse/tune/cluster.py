"""The time of an all-reduce on a cluster of equal nodes: ring, tree and two levels. Measures nothing.

Each of the three takes a start-up time plus a time per byte, so that the planner is exact. `nccl_model.py` has
NCCL's own model, which mixes ring and tree and their protocols; this file has the textbook's, one algorithm at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpfuse.tune.connection_table import Connection
from dpfuse.tune.cost import CostTable

__all__ = ["ALGORITHMS", "Cluster"]

ALGORITHMS = ("ring", "tree", "two-level")


@dataclass(frozen=True)
class Cluster:
    """Nodes with the same number of ranks, and a network between them.

    Args:
        inside: the connection inside a node.
        network: the network between nodes.
        ranks_per_node: ranks of a full node.
        cards: network cards of a node, which share the bytes; None takes the usual number of `network`.

    Raises:
        ValueError: a number is less than 1.

    Example:
        >>> from dpfuse.tune import INSIDE, NETWORKS, Cluster
        >>> cluster = Cluster(INSIDE["nvlink-4"], NETWORKS["infiniband-ndr"])
        >>> [round(cluster.cost(64, name)(100e6) * 1e3, 2) for name in ("ring", "tree", "two-level")]
        [1.11, 0.67, 1.06]
    """

    inside: Connection
    network: Connection
    ranks_per_node: int = 8
    cards: int | None = None

    def __post_init__(self) -> None:
        for name, number in (("ranks_per_node", self.ranks_per_node), ("cards", self.cards)):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, got {number!r}")

    @property
    def network_bandwidth(self) -> float:
        """Bytes per second of all cards of a node together, in one direction."""
        return self.network.bandwidth * (self.cards or self.network.cards)

    def nodes(self, ranks: int) -> int:
        """Return how many nodes `ranks` ranks fill.

        Raises:
            ValueError: there is less than one rank, or the ranks do not fill their nodes.
        """
        if ranks < 1:
            raise ValueError(f"expected 1 rank or more, got {ranks!r}")
        if ranks > self.ranks_per_node and ranks % self.ranks_per_node:
            raise ValueError(
                f"{ranks} ranks do not fill nodes of {self.ranks_per_node}; expected a multiple of that, or fewer"
            )
        return math.ceil(ranks / self.ranks_per_node)

    def cost(self, ranks: int, algorithm: str) -> CostTable:
        """Return the seconds of an all-reduce by its bytes.

        Args:
            ranks: in full nodes, or in one node.
            algorithm: one of `ALGORITHMS`.
                `ring`: all ranks form one ring, which passes each node once. It has 2(n - 1) steps, of which 2(N - 1)
                cross the network, and each rank sends 2(n - 1)/n of the bytes over the slowest connection.
                `tree`: a double binary tree of nodes with a chain inside each node; up and down again. Its latency
                grows with log2(N), and each rank sends twice the bytes.
                `two-level`: a reduce-scatter inside each node, an all-reduce by halving and doubling between nodes, in
                which each rank sends its own part, and an all-gather inside each node.

        Raises:
            ValueError: there is less than one rank, the ranks do not fill their nodes, or the algorithm is unknown.

        Source: ring: Patarasuk and Yuan 2009. Double tree: Sanders, Speck, Träff 2009, and NCCL 2.4. Halving and
        doubling: Thakur, Rabenseifner, Gropp 2005; in two levels as by Goyal and others 2017.
        """
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
        nodes = self.nodes(ranks)
        inside = ranks // nodes
        if algorithm == "two-level":
            latency, per_byte = self._two_levels(inside, nodes)
        else:
            slowest = min(
                self.inside.bandwidth if inside > 1 else math.inf,
                self.network_bandwidth if nodes > 1 else math.inf,
            )
            times = 2 * (ranks - 1) / ranks if algorithm == "ring" else 2 * (ranks > 1)
            latency, per_byte = self._latency(algorithm, inside, nodes), times / slowest
        return CostTable.affine(latency, 1 / per_byte if per_byte else math.inf)

    def _latency(self, algorithm: str, inside: int, nodes: int) -> float:
        if algorithm == "ring":
            crossings = 2 * (nodes - 1)
            return (2 * (inside * nodes - 1) - crossings) * self.inside.latency + crossings * self.network.latency
        return 2 * ((inside - 1) * self.inside.latency + _levels(nodes) * self.network.latency)

    def _two_levels(self, inside: int, nodes: int) -> tuple[float, float]:
        """Return start-up seconds and seconds per byte. All ranks of a node share its cards."""
        latency = 2 * ((inside - 1) * self.inside.latency + _levels(nodes) * self.network.latency)
        per_byte = 2 * (inside - 1) / inside / self.inside.bandwidth
        return latency, per_byte + 2 * (nodes - 1) / nodes / self.network_bandwidth


def _levels(nodes: int) -> int:
    return (nodes - 1).bit_length()  # log2, rounded up
