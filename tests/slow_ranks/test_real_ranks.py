"""Delays on real ranks over gloo: are the rank and the phase named in time, and is nothing said of healthy runs?

`python -m bench.slow_ranks` plays all cases, and writes the record.
"""

from __future__ import annotations

import time
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from bench.slow_ranks import DELAYED, Case, found, play
from dpfuse.comm.step_clock import LOADER
from dpfuse.comm.waiting import board_of

pytestmark = pytest.mark.timeout(600)


def played(rank, size, *cases):
    return play([asdict(case) for case in cases])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "phase"), [(2, "forward"), *((2 + index % 3, phase) for index, phase in enumerate(DELAYED))]
)
def test_a_delay_as_long_as_a_step_is_attributed(ranks, size, phase):
    """The record of `bench.slow_ranks` has delays of a fifth of a step, which need a quiet machine."""
    ((result,), *others) = ranks(played, Case(phase, size - 1, delay=1.0), size=size, timeout=120)
    assert found(result), result
    assert result["numbers"]["late_rank"] == size - 1
    assert all(other["heard"] == [] and other["numbers"] == {} for (other,) in others)


@pytest.mark.slow
def test_nothing_is_said_of_healthy_runs(ranks):
    ((*results,), *_) = ranks(played, *(Case(seed=seed) for seed in range(5)), size=3, timeout=300)
    assert [result["heard"] for result in results] == [[]] * 5


@pytest.mark.parametrize("on", [True, False])
def test_a_model_that_is_not_checked_is_not_timed(rank, size, on):
    group = dist.new_group(list(range(size)))
    model = dpfuse.DataParallel(nn.Linear(4, 2), group=group, check_training="warn" if on else "off", metrics=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    board = board_of(group)
    board.late = {"late_rank": 1.0}  # as another model of the group has found
    assert model.metrics() == {}
    board.late = {}
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert board.waited > 0
    assert (board.clock is not None) is on
    if on:
        board.clock.add_up()
        assert board.clock.steps == 3
        assert "late_rank" not in model.metrics()
        board.late = {"late_rank": 1.0}
        assert model.metrics()["late_rank"] == 1.0
        board.late = {}
    del model
    dist.destroy_process_group(group)


def test_a_window_of_local_backwards_is_one_step(rank, size):
    group = dist.new_group(list(range(size)))
    model = dpfuse.DataParallel(nn.Linear(4, 2), group=group)
    for step in range(4):
        with model.no_sync(enabled=step % 2 == 0):
            model(torch.ones(2, 4)).sum().backward()
    clock = board_of(group).clock
    clock.add_up()
    assert clock.steps == 2
    del model
    dist.destroy_process_group(group)


def test_the_loader_has_its_time_where_each_of_several_backwards_is_averaged(rank, size):
    group = dist.new_group(list(range(size)))
    model = dpfuse.DataParallel(nn.Linear(4, 2), group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock = board_of(group).clock
    for step in range(20):
        if step == 4:  # since then it is known that the optimizer tells
            clock.add_up()
            before = [*clock._seconds]
        time.sleep(0.01)
        model(torch.ones(2, 4)).sum().backward()
        if step % 4 == 3:
            optimizer.step()
    clock.add_up()
    seconds = [after - first for after, first in zip(clock._seconds, before, strict=True)]
    assert seconds[LOADER] >= 16 * 0.01
    del model
    dist.destroy_process_group(group)
