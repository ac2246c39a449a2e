"""NCCL's model of a network: the time of an all-reduce by bytes and number of ranks. Measures nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dpfuse.tune.cost import CostTable, Floats

__all__ = ["ETHERNET", "INFINIBAND", "NVLINK", "Link"]

MICRO = 1e-6
GRID = np.exp2(np.arange(6, 36, 0.25))  # bytes, 64 B to 32 GiB; interpolating a concave cost has an error below 0.4 %


class _Way(NamedTuple):
    """One of NCCL's algorithms: start-up and hops in µs, and the part of the bandwidth that it reaches."""

    is_ring: bool
    start: float
    inside_hop: float
    network_hop: float
    efficiency: float


# ncclTunerConstantsDefaults: baseLatencies, hwLatencies of NVLink and of the network; ncclTopoTuneModel: bandwidths.
WAYS = (
    _Way(True, 6.6, 0.6, 2.7, 0.5),  # ring, LL
    _Way(True, 14.0, 1.9, 4.0, 0.92),  # ring, LL128
    _Way(True, 8.4, 3.4, 14.0, 1.0),  # ring, Simple
    _Way(False, 6.8, 0.6, 5.0, 0.92 / 3.8),  # tree, LL
    _Way(False, 14.0, 1.25, 8.5, 0.92 * 120 / 128),  # tree, LL128
    _Way(False, 8.4, 4.0, 14.0, 0.92),  # tree, Simple
)


@dataclass(frozen=True)
class Link:
    """The connection between ranks: nodes with several GPUs, and a network between the nodes.

    Args:
        name: for tables.
        ranks_per_node: GPUs that reach each other without the network.
        inside_bandwidth: bytes per second of a ring inside a node, in one direction.
        network_bandwidth: bytes per second of all network cards of a node together, in one direction.
        hop_overhead: seconds per hop through the network, added to NCCL's latency.
        max_ranks: of the largest such machine; None means any number.

    Example:
        >>> from bench.nccl_model import ETHERNET, INFINIBAND
        >>> size = 25 * 2**20
        >>> INFINIBAND.cost(64)(size) < INFINIBAND.cost(16384)(size) < ETHERNET.cost(64)(size)
        True

    Source: NCCL 2.28.7, src/graph/tuning.cc (latencies and protocols of ring and tree). Left out: NVLS and CollNet,
    the correction of trees at medium sizes, the plateau of rings. Use it to compare plans and to see the shape of the
    curve. `dpfuse.tune.measure_all_reduce` is better if you can run a job.
    """

    name: str
    ranks_per_node: int
    inside_bandwidth: float
    network_bandwidth: float
    hop_overhead: float = 0.0
    max_ranks: int | None = None

    def cost(self, ranks: int) -> CostTable:
        """Return the table for `ranks` ranks, in full nodes.

        Raises:
            ValueError: There are fewer than 2 ranks or more than `max_ranks`, or they do not fill their nodes.
        """
        if ranks < 2 or (self.max_ranks is not None and ranks > self.max_ranks):
            most = "2 or more" if self.max_ranks is None else f"2 to {self.max_ranks}"
            raise ValueError(f"{self.name} connects {most} ranks, got {ranks!r}")
        if ranks > self.ranks_per_node and ranks % self.ranks_per_node:
            raise ValueError(
                f"{ranks} ranks do not fill nodes of {self.ranks_per_node}; expected a multiple of that, or fewer"
            )
        times = np.min([self._time(way, ranks) for way in WAYS], axis=0)
        # NCCL chooses an algorithm by size. More bytes must never take less time.
        return CostTable(tuple(GRID), tuple(np.maximum.accumulate(times)))

    def _time(self, way: _Way, ranks: int) -> Floats:
        nodes = math.ceil(ranks / self.ranks_per_node)
        inside = min(ranks, self.ranks_per_node)
        network_hop = way.network_hop + self.hop_overhead / MICRO
        bus = self.inside_bandwidth if nodes == 1 else min(self.inside_bandwidth, self.network_bandwidth)
        if way.is_ring:
            network_steps = 2 * nodes if nodes > 1 else 0
            latency = (2 * (ranks - 1) - network_steps) * way.inside_hop + network_steps * network_hop
            per_byte = 2 * (ranks - 1) / ranks / (bus * way.efficiency)
        else:
            latency = 2 * ((inside - 1) * way.inside_hop + math.log2(nodes) * network_hop)
            per_byte = 2 / (bus * way.efficiency)
        times: Floats = (way.start + latency) * MICRO + GRID * per_byte
        return times


NVLINK = Link("NVLink", 576, 370e9, 370e9, max_ranks=576)
"""GPUs of one NVLink domain: 8 in a server, 72 in a rack, 576 at most. NVLink 4 has 450 GB/s per direction. NCCL's
topology search uses 370 GB/s for eight H100."""

INFINIBAND = Link("InfiniBand", 8, 370e9, 8 * 48e9)
"""Servers of eight GPUs with NVLink and one 400 Gb/s card per GPU, for which NCCL uses 48 GB/s."""

ETHERNET = Link("Ethernet", 8, 20e9, 2.8e9, hop_overhead=27e-6)
"""Servers of eight GPUs on PCI Express with one 25 Gb/s card and TCP. A hop takes 30 µs, as measured by the authors of
MG-WFBP over 10 Gb/s Ethernet (0.908 ms with 16 ranks, `distributed_optimizer.py` in their repository). The other
numbers are computed."""
