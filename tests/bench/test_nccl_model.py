"""What NCCL expects of networks, computed by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bench.nccl_model import ETHERNET, INFINIBAND, NVLINK, Link

MIB = 1 << 20
RANKS = tuple(8 << power for power in range(12))  # 8 to 16,384


@pytest.mark.parametrize("link", [NVLINK, INFINIBAND, ETHERNET], ids=lambda link: link.name)
def test_links_cost_more_with_more_ranks_and_more_bytes(link):
    tables = [link.cost(ranks) for ranks in RANKS if link.max_ranks is None or ranks <= link.max_ranks]
    sizes = [1 << power for power in range(31)]
    for fewer, more in pairwise(tables):
        assert all(fewer(size) <= more(size) * (1 + 1e-9) for size in sizes)
    for table in tables:
        assert all(table(size) <= table(2 * size) for size in sizes)
        # Concave, so that sending in pieces never pays.
        assert all(table(2 * size) <= 2 * table(size) for size in sizes)


def test_a_large_all_reduce_on_a_link_moves_twice_its_bytes():
    """In a ring of P ranks each byte passes 2 (P - 1) / P times: latency plus that, checked by hand."""
    size = 1 << 30
    expected = 8.4e-6 + 14 * 3.4e-6 + size * 2 * 7 / 8 / 370e9
    assert NVLINK.cost(8)(size) == pytest.approx(expected, rel=1e-3)
    steps = 2 * 63 - 2 * 8
    expected = 8.4e-6 + steps * 3.4e-6 + 16 * 14e-6 + size * 2 * 63 / 64 / 370e9
    assert INFINIBAND.cost(64)(size) == pytest.approx(expected, rel=1e-3)


def test_a_tree_sends_small_buckets_over_many_nodes():
    """Ring latency grows with the ranks, that of a tree with the logarithm of the nodes."""
    expected = 6.8e-6 + 2 * (7 * 0.6e-6 + 11 * 5e-6)
    assert INFINIBAND.cost(16384)(64) == pytest.approx(expected, rel=1e-3)


def test_a_node_alone_needs_no_network():
    assert INFINIBAND.cost(8) == NVLINK.cost(8)
    assert ETHERNET.cost(8)(MIB) < ETHERNET.cost(16)(MIB) / 3


def test_links_connect_whole_nodes():
    for link, ranks, message in [
        (INFINIBAND, 12, "12 ranks do not fill nodes of 8"),
        (INFINIBAND, 1, "InfiniBand connects 2 or more ranks, got 1"),
        (NVLINK, 1024, "NVLink connects 2 to 576 ranks, got 1024"),
    ]:
        with pytest.raises(ValueError, match=message):
            link.cost(ranks)
    assert Link("own", 4, 1e9, 1e8).cost(2)(0) > 0
