"""The harness itself: a failing or hanging rank must fail the test, or no distributed test means anything."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.patience import patience
from tests.ranks import RankError, RankPool


def sum_of_ranks(rank: int, size: int) -> float:
    value = torch.tensor(float(rank + 1))
    dist.all_reduce(value)
    return value.item()


def fails_on_rank_1(rank: int, size: int) -> None:
    if rank == 1:
        raise ValueError("planted")
    dist.barrier()


def hangs(rank: int, size: int) -> None:
    time.sleep(600)


def test_every_rank_returns_its_result(ranks):
    assert ranks(sum_of_ranks) == [3.0, 3.0]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("value", [5])
def test_each_rank_calls_a_test_that_takes_rank_and_size(rank, size, value):
    assert (dist.get_rank(), dist.get_world_size(), value) == (rank, size, 5)


@pytest.mark.ranks(size=3)
def test_a_marker_says_how_many_ranks_do(rank, size):
    assert (dist.get_world_size(), size) == (3, 3)


def patches(rank, size, patch):
    patch.setattr(os, "sep", "planted")


def sep(rank, size):
    return os.sep


def test_what_a_test_patches_on_its_ranks_is_undone_there(ranks, monkeypatch):
    ranks(patches, monkeypatch)
    assert ranks(sep) == [os.sep] * 2


@pytest.mark.xfail(raises=RankError, strict=True)
def test_what_one_rank_raises_fails_such_a_test(rank, size):
    assert rank == 0


@pytest.mark.slow
@pytest.mark.parametrize(("function", "text"), [(fails_on_rank_1, "planted"), (hangs, r"no answer(.|\n)*in hangs\n")])
def test_a_failure_or_a_hang_on_a_rank_is_an_error(function, text):
    pool = RankPool(2)
    with pytest.raises(RankError, match=text):
        pool.run(function, timeout=2)
    assert not pool.healthy


def ends_soon(rank: int, size: int) -> None:
    threading.Timer(0.1, os._exit, [7]).start()


@pytest.mark.slow
def test_a_rank_that_ends_between_two_tests_is_named_with_the_test_before():
    pool = RankPool(2)
    pool.run(ends_soon)
    assert all(pipe.poll(patience(30)) for pipe in pool._pipes), "their ends are closed"
    with pytest.raises(RankError, match=r"rank 0 ended after .*ends_soon had returned, with exit code 7"):
        pool.run(sum_of_ranks)
    assert not pool.healthy
