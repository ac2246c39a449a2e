"""Cost tables."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dpfuse.tune import CostTable

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


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        ([], [], r"got sizes=\(\)"),
        ([1, 2], [1], r"got sizes=\(1.0, 2.0\) and seconds=\(1.0,\)"),
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
