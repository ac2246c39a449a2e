"""Cost tables and what NCCL expects of networks."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from dpfuse.tune import ETHERNET, INFINIBAND, NVLINK, RANKS, CostTable, Link

MIB = 1 << 20


def test_a_line_is_met_exactly_at_every_size():
    cost = CostTable.affine(20e-6, 50e9)
    for size in (0, 1, 1000, MIB, 3 << 30, 1 << 40):
        assert cost(size) == pytest.approx(20e-6 + size / 50e9, rel=1e-12)
    table = CostTable([1024, 4096, MIB], [20e-6 + size / 50e9 for size in (1024, 4096, MIB)])
    for size in (1024, 3000, 99_999, MIB, 1 << 33):
        assert table(size) == pytest.approx(cost(size), rel=1e-9)


def test_below_the_first_point_its_time_holds():
    assert CostTable([1000, 2000], [1.0, 3.0])(10) == 1.0
    assert CostTable([1000], [1.0])(10**9) == 1.0


def test_arrays_and_numbers_agree():
    cost = CostTable([10, 100, 1000], [1.0, 2.0, 7.0])
    sizes = np.array([0.0, 5, 10, 55, 100, 999, 5000])
    assert cost(sizes).tolist() == [cost(size) for size in sizes.tolist()]


def isotonic(values):
    """The nearest sequence that does not fall, by its max-min formula."""
    return [
        max(min(np.mean(values[low : high + 1]) for high in range(place, len(values))) for low in range(place + 1))
        for place in range(len(values))
    ]


def test_measured_times_that_fall_are_pooled():
    rng = np.random.default_rng(0)
    for _ in range(100):
        times = np.exp(rng.normal(0, 1, rng.integers(1, 9)))
        sizes = np.cumsum(rng.random(len(times)) + 1)
        shuffled = rng.permutation(len(times))
        cost = CostTable.measured(sizes[shuffled].tolist(), times[shuffled].tolist())
        assert cost.sizes == tuple(sizes)
        assert cost.seconds == pytest.approx(np.exp(isotonic(np.log(times))))


def test_a_size_measured_twice_is_averaged():
    assert CostTable.measured([8, 8, 16], [1.0, 4.0, 3.0]).seconds == pytest.approx((2.0, 3.0))


def test_more_for_each_bucket_and_each_byte():
    for cost in (CostTable.affine(1.0, 10.0), CostTable([0, 50, 70], [1, 6, 8]), CostTable([0], [1])):
        more = cost.plus(0.5, 0.01)
        for size in (0, 20, 50, 60, 70, 5000):
            assert more(size) == pytest.approx(cost(size) + 0.5 + 0.01 * size)
    with pytest.raises(ValueError, match="times >= 0"):
        CostTable.affine(1.0, 1.0).plus(-1.0)


def cheapest_split(cost, total):
    """Of bytes in any whole pieces, by a table of all smaller totals."""
    best = [0.0]
    for size in range(1, total + 1):
        best.append(min(best[size - piece] + cost(piece) for piece in range(1, size + 1)))
    return best[total]


def test_nothing_is_cheaper_than_the_cheapest():
    rng = np.random.default_rng(4)
    for _ in range(40):
        sizes = np.cumsum(rng.integers(1, 12, 4))
        cost = CostTable.measured(sizes.tolist(), np.sort(rng.random(4) + 0.01).tolist())
        for total in (1, 5, 17, 40):
            bound = float(cost.cheapest(np.array([float(total)]))[0])
            assert bound <= min(cheapest_split(cost, total), cost(total)) * (1 + 1e-12)
    line = CostTable.affine(3.0, 2.0)
    assert line.cheapest(np.array([0.0, 10.0])).tolist() == pytest.approx([3.0, 8.0])


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        ([], [], "got 0 sizes"),
        ([1, 2], [1], "got 2 sizes and 1 times"),
        ([2, 1], [1, 2], "sizes must increase"),
        ([1, 1], [1, 2], "sizes must increase"),
        ([1, 2], [2, 1], "times must not decrease"),
        ([1, 2], [1, math.nan], "finite and >= 0"),
        ([-1, 2], [1, 2], "finite and >= 0"),
        ([1, math.inf], [1, 2], "finite and >= 0"),
    ],
)
def test_a_table_must_be_one(sizes, seconds, message):
    with pytest.raises(ValueError, match=message):
        CostTable(sizes, seconds)


def test_measurements_and_lines_are_checked():
    for sizes, seconds in (([], []), ([1], [0.0]), ([1], [math.nan]), ([1, 2], [1.0])):
        with pytest.raises(ValueError, match="a time above 0 s for each size"):
            CostTable.measured(sizes, seconds)
    for latency, bandwidth in ((-1.0, 1.0), (1.0, 0.0), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="bandwidth > 0"):
            CostTable.affine(latency, bandwidth)


def test_json_gives_back_the_table():
    cost = CostTable([1, 2.5], [0.1 + 0.2, 4])
    assert CostTable.from_json(cost.to_json()) == cost
    with pytest.raises(ValueError, match="dpfuse cost table 1"):
        CostTable.from_json({})


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
