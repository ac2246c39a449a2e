"""Connections between GPUs, with bandwidth, latency and source of both numbers. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["INSIDE", "NETWORKS", "Connection"]

GB, MICRO = 1e9, 1e-6
REACHED = 12.0 / 12.5  # part of a network's nominal rate: NCCL's topology search counts 12.0 GB/s for 100 Gb/s

# Per hop of a ring, protocol Simple, as for nccl_model.py: NCCL 2.28.7, src/graph/tuning.cc.
NVLINK_HOP, PCI_HOP, RDMA_HOP = 3.4 * MICRO, 5.7 * MICRO, 14.0 * MICRO
TCP_HOP = 30.3 * MICRO  # 0.908 ms for the 30 hops of a ring of 16 ranks
EFA_HOP = RDMA_HOP + 75 * MICRO


@dataclass(frozen=True)
class Connection:
    """One way from a GPU to others: inside a node, or one network card of a node.

    Args:
        name: for tables and the command line.
        bandwidth: bytes per second in one direction that an all-reduce can reach; for a network, those of one card.
        latency: seconds of one hop.
        source: of both numbers.
        cards: network cards that a node usually has; 1 inside a node.

    Example:
        >>> from dpfuse.tune import NETWORKS
        >>> NETWORKS["ethernet-25"].bandwidth, NETWORKS["ethernet-25"].cards
        (3000000000.0, 1)
    """

    name: str
    bandwidth: float
    latency: float
    source: str
    cards: int = 1


def _table(*connections: Connection) -> dict[str, Connection]:
    return {connection.name: connection for connection in connections}


def _nvlink(name: str, links: int, each: float, gpu: str) -> Connection:
    return Connection(name, links * each * GB, NVLINK_HOP, f"{gpu}, {links} links of {each} GB/s: {NCCL}")


def _network(name: str, gigabits: float, latency: float, source: str, cards: int = 1) -> Connection:
    return Connection(name, gigabits / 8 * REACHED * GB, latency, source, cards)


NCCL = "NCCL, src/graph/topo.h and tuning.cc"
RDMA = f"nominal rate x 0.96, and the hop: {NCCL}"
TCP = "nominal rate x 0.96 (as for RDMA); the hop: MG-WFBP's authors, 0.908 ms for 16 ranks"
EFA = "rate: Amazon; x 0.96; the hop: NCCL's and 75 µs of aws-ofi-nccl, src/platform-aws.cpp"

INSIDE = _table(
    _nvlink("nvlink-4", 18, 20.6, "H100, H200"),
    _nvlink("nvlink-3", 12, 20.0, "A100"),
    _nvlink("nvlink-2", 6, 20.0, "V100"),
    _nvlink("nvlink-1", 4, 18.0, "P100"),
    Connection("pcie-5", 48 * GB, PCI_HOP, f"x16, four times PCIe 3: {NCCL}"),
    Connection("pcie-4", 24 * GB, PCI_HOP, f"x16, twice PCIe 3: {NCCL}"),
    Connection("pcie-3", 12 * GB, PCI_HOP, f"x16: {NCCL}"),
)
"""Connections inside a node, by name. The bandwidth is that of a ring through all GPUs."""

NETWORKS = _table(
    _network("infiniband-ndr", 400, RDMA_HOP, RDMA, cards=8),
    _network("infiniband-hdr", 200, RDMA_HOP, RDMA, cards=8),
    _network("infiniband-edr", 100, RDMA_HOP, RDMA, cards=4),
    _network("efa-p5", 100, EFA_HOP, EFA, cards=32),
    _network("efa-p4d", 100, EFA_HOP, EFA, cards=4),
    _network("roce-100", 100, RDMA_HOP, RDMA),
    _network("roce-50", 50, RDMA_HOP, RDMA),
    _network("roce-25", 25, RDMA_HOP, RDMA),
    _network("ethernet-100", 100, TCP_HOP, TCP),
    _network("ethernet-40", 40, TCP_HOP, TCP),
    _network("ethernet-25", 25, TCP_HOP, TCP),
    _network("ethernet-10", 10, TCP_HOP, TCP),
)
"""Networks between nodes, by name. `ethernet` is TCP, `roce` is RDMA over Ethernet."""
