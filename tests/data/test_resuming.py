"""A job that goes on with another number of ranks inside an epoch: each sample of each epoch is trained once."""

from __future__ import annotations

import random
import warnings
from collections import Counter

import pytest
import torch
from torch import nn

import dpfuse
from tests.data.streams import KINDS

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores


def steps_of(kind, state, batch_size, size, steps, workers):
    """What all ranks are given in this many steps, as (epoch, sample); and the state that each rank then has."""
    given, states = [], []
    for rank in range(size):
        data, loader = KINDS[kind](LENGTH, batch_size, size, rank, num_workers=workers)
        if state is not None:
            data.load_state_dict(state)
        left = steps
        while left:
            for batch in data.track(loader):
                given += [(data.epoch, sample) for sample in batch.tolist()]
                left -= 1
                if not left:
                    break
        states.append(data.state_dict())
    assert all(other == states[0] for other in states)
    return given, states[0]


LENGTH = 83
JOBS = ((4, 3, 3), (3, 2, 7), (5, 4, 4))  # ranks, size of a batch, steps


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_from_4_to_3_to_5_ranks_each_sample_comes_once_in_each_epoch(kind, workers):
    state, given = None, []
    for size, batch_size, steps in JOBS:
        more, state = steps_of(kind, state, batch_size, size, steps, workers)
        given += more
    assert state["epoch"] == 1  # the last job went on into the next epoch
    counted = Counter(given)
    assert {*counted.values()} == {1}
    assert {sample for epoch, sample in counted if epoch == 0} == {*range(LENGTH)}
    assert sum(epoch == 1 for epoch, _ in counted) == state["seen"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_workers_that_load_ahead_move_no_position(kind):
    """The workers have loaded all of the epoch when the loop has got its second batch."""
    data, loader = KINDS[kind](24, 2, 2, 0, num_workers=2, prefetch_factor=6)
    loop = data.track(loader)
    for _ in range(2):
        next(loop)
    assert data.state_dict()["seen"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_random_jobs_lose_no_sample_and_repeat_none(kind):
    choose = random.Random(11)
    for _ in range(60):
        state, given = None, []
        while state is None or state["epoch"] < 2:
            left = LENGTH - (state["seen"] if state else 0)
            size = choose.randint(1, max(1, min(6, left)))  # no more ranks than samples: each has a batch in this step
            more, state = steps_of(kind, state, choose.randint(1, 7), size, 1, 0)
            given += more
        counted = Counter(pair for pair in given if pair[0] < 2)
        assert {*counted.values()} == {1}
        assert len(counted) == 2 * LENGTH


def train(rank, size, folder, kind, workers, batch_size, steps):
    """Train some steps of a job, from its newest checkpoint on; return the samples of each epoch."""
    model = dpfuse.DataParallel(nn.Linear(1, 1))
    data, loader = KINDS[kind](LENGTH, batch_size, size, rank, num_workers=workers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # random states of another number of ranks
        step = dpfuse.load_checkpoint(folder, model, sampler=data).step
    given, stop = [], step + steps
    while step < stop:
        for batch in data.track(loader):
            model.set_gradient_weight(len(batch))
            model(batch.float()[:, None]).mean().backward()
            given += [(data.epoch, sample) for sample in batch.tolist()]
            step += 1
            if step == stop:
                dpfuse.save_checkpoint(folder, model, step=step, sampler=data)
                break
    return given


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        ("map", 0),
        ("iterable", 0),
        pytest.param("map", 2, marks=pytest.mark.slow),
        pytest.param("iterable", 2, marks=pytest.mark.slow),
    ],
)
def test_a_job_of_two_ranks_goes_on_with_three(ranks, tmp_path, kind, workers):
    given = [
        pair
        for size, batch_size, steps in ((2, 5, 4), (3, 4, 2), (2, 3, 3), (1, 5, 1))
        for part in ranks(train, tmp_path, kind, workers, batch_size, steps, size=size)
        for pair in part
    ]
    counted = Counter(given)
    assert {*counted.values()} == {1}
    assert {*counted} == {(0, sample) for sample in range(LENGTH)}


class Uncounted:
    """A sampler whose state belongs to one rank, as it does not say otherwise."""

    def state_dict(self):
        return {"at": 1}

    def load_state_dict(self, state):
        pass


def other_states(rank, size, folder, saving):
    model = nn.Linear(1, 1)
    if saving:
        return dpfuse.save_checkpoint(folder, model, step=1, sampler=Uncounted()) and None
    with pytest.raises(ValueError, match="has the states of 2 rank"):
        dpfuse.load_checkpoint(folder, model, sampler=Uncounted())
    return True


def test_other_states_are_not_taken_to_another_number_of_ranks(ranks, tmp_path):
    ranks(other_states, tmp_path, True)
    assert ranks(other_states, tmp_path, False, size=1) == [True]


def test_a_state_is_small_and_safe_to_load(tmp_path):
    for kind in KINDS:
        data, _ = KINDS[kind](LENGTH, 2, 1, 0)
        torch.save(data.state_dict(), tmp_path / kind)
        assert torch.load(tmp_path / kind, weights_only=True) == data.state_dict()
        assert all(isinstance(value, int) for value in data.state_dict().values())
