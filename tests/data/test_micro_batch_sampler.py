"""Micro-batches have the same samples, drawn with the same random numbers, on any number of ranks and workers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import dpfuse
from dpfuse.data import MicroBatchSampler, SeededDataset
from dpfuse.engine.micro_batches import MicroBatches

SAMPLES, SIZE, COUNT = 53, 2, 5  # five steps of ten samples in an epoch


class Noisy(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)


def dealt(ranks, *, epochs=1, workers=0, state=None, stop=None):
    """What each micro-batch of each step gets, and the state after it or after so many steps."""
    dataset, found, after = SeededDataset(Noisy(), seed=3), {}, []
    for rank in range(ranks):
        sampler = MicroBatchSampler(dataset, SIZE, COUNT, num_replicas=ranks, rank=rank, seed=8)
        if state is not None:
            sampler.load_state_dict(state)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=workers)
        numbers, done = MicroBatches(COUNT, ranks).of(rank), 0
        for _ in range(epochs):
            for batches in sampler.steps(loader):
                # Several epochs have as many steps each, so the place in the data is the epoch and the step.
                for number, batch in zip(numbers, batches, strict=True):
                    found[sampler.epoch, sampler.seen, number] = batch.tolist()
                done += 1
                if done == stop:
                    break
        after.append(sampler.state_dict())
    assert all(each == after[0] for each in after)
    return found, after[0]


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_a_micro_batch_is_the_same_on_any_number_of_ranks(ranks):
    whole, _ = dealt(1, epochs=2)
    assert dealt(ranks, epochs=2)[0] == whole
    assert len(whole) == 2 * (SAMPLES // (SIZE * COUNT)) * COUNT


def test_an_epoch_has_each_sample_at_most_once_and_the_next_one_another_order():
    whole, _ = dealt(1, epochs=2)
    orders = [[row[0] for key in sorted(whole) if key[0] == epoch for row in whole[key]] for epoch in (0, 1)]
    assert all(len(set(order)) == len(order) == 50 for order in orders)
    assert orders[0] != orders[1]


def test_workers_and_another_epoch_draw_for_a_sample_what_belongs_to_it():
    whole, _ = dealt(1, epochs=2)
    assert dealt(2, epochs=2, workers=2)[0] == whole
    drawn = [{row[0]: row[1:] for key, rows in whole.items() if key[0] == epoch for row in rows} for epoch in (0, 1)]
    both = drawn[0].keys() & drawn[1].keys()
    assert both
    assert all(drawn[0][index] != drawn[1][index] for index in both)


def test_another_number_of_ranks_goes_on_inside_an_epoch():
    whole, _ = dealt(1)
    first, state = dealt(3, stop=2)
    rest, _ = dealt(2, state=state)
    assert {**first, **rest} == whole
    assert not first.keys() & rest.keys()


def test_loading_leaves_the_generators_of_the_program_alone():
    dataset = SeededDataset(Noisy())
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    before = torch.rand(1), random.random(), np.random.rand()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    assert torch.equal(dataset[3], dataset[3])
    assert (torch.rand(1), random.random(), np.random.rand()) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((range(9), 2, 5), "samples of a step"),
        ((range(90), 2, 3, 4, 0), "at least the number of ranks"),
        ((range(90), 0, 3), "batch_size must be at least 1"),
        ((range(90), 2, 0), "fixed_micro_batches must be at least 1"),
    ],
)
def test_a_wrong_argument_is_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        MicroBatchSampler(*arguments)


def test_the_state_of_other_micro_batches_and_another_loader_are_refused():
    state = dealt(1, stop=1)[1]
    with pytest.raises(ValueError, match="micro_batches"):
        MicroBatchSampler(range(SAMPLES), SIZE, COUNT + 1, seed=8).load_state_dict(state)
    sampler = MicroBatchSampler(range(SAMPLES), SIZE, COUNT)
    with pytest.raises(ValueError, match="batch_sampler"):
        sampler.steps(DataLoader(range(SAMPLES), batch_size=2))
    with pytest.raises(TypeError, match="must have samples and a length"):
        MicroBatchSampler(iter(range(90)), 2, 3)


def test_a_position_that_was_not_counted_is_not_saved():
    sampler = MicroBatchSampler(range(SAMPLES), SIZE, COUNT)
    list(sampler)
    with pytest.raises(dpfuse.DPFuseError, match="not counted"):
        sampler.state_dict()
