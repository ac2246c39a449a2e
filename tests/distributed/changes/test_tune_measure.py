"""All-reduces timed on real ranks: every rank gets the same table."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from dpfuse.errors import DPFuseError
from dpfuse.tune import measure, measure_all_reduce
from tests.patience import patience


def measure_all(rank, size, late=0.0):
    real = measure._time

    def start_late(flat, group):
        if rank == 1:
            time.sleep(late)
        return real(flat, group)

    measure._time = start_late
    try:
        cost = measure_all_reduce(sizes=[1 << 22, 1 << 10, 1 << 10, 1 << 16], repetitions=5)
    finally:
        measure._time = real
    return cost.sizes, cost.seconds


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_gets_the_same_table(ranks, size):
    (sizes, seconds), *others = ranks(measure_all, size=size, timeout=60)
    assert all(other == (sizes, seconds) for other in others)
    assert sizes == (1 << 10, 1 << 16, 1 << 22)
    # No message passes between processes in less than a microsecond, and 4 MiB take longer than 1 KiB.
    assert 1e-6 < seconds[0] <= seconds[1] <= seconds[2] < 5
    assert seconds[0] < seconds[2]


@pytest.mark.slow
def test_waiting_for_a_late_rank_does_not_count(ranks):
    late = patience(0.05)
    (_, seconds), other = ranks(measure_all, late, size=2, timeout=60)
    assert other[1] == seconds
    assert seconds[0] < late


def bad_calls(rank, size):
    errors = []
    for sizes, repetitions in (([], 1), ([2], 1), ([1024], 0)):
        try:
            measure_all_reduce(sizes=sizes, repetitions=repetitions)
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_nothing_to_measure_is_refused(ranks):
    for errors in ranks(bad_calls, size=2, timeout=30):
        assert [error.partition(" must be")[0] for error in errors] == [
            "the number of sizes",
            "each of sizes",
            "repetitions",
        ]


def test_without_a_group_there_is_nothing_to_measure():
    assert not dist.is_initialized()
    with pytest.raises(DPFuseError, match="there is no process group to measure"):
        measure_all_reduce()
