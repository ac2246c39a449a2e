"""What `CountedLoader` tells Lightning, with a Trainer that only counts; test_stopping.py runs real ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from dpfuse.data import ResumableBatchSampler
from dpfuse.integrations.counted_loader import CountedLoader, counted

SAMPLES = 20


class Count:
    """Of the batches of this epoch, as Lightning keeps it."""

    def __init__(self, ready):
        self.ready = ready

    def increment_by(self, number):
        self.ready += number


def trainer_after(batches, loaders=1):
    loop = SimpleNamespace(batch_progress=SimpleNamespace(current=Count(batches)))
    fit_loop = SimpleNamespace(epoch_loop=loop, _combined_loader=SimpleNamespace(flattened=[None] * loaders))
    return SimpleNamespace(training=True, fit_loop=fit_loop)


def made(batch_size=2, replicas=2, trained=0, **loading):
    sampler = ResumableBatchSampler(range(SAMPLES), batch_size, num_replicas=replicas, rank=0, shuffle=False)
    return CountedLoader(DataLoader(range(SAMPLES), batch_sampler=sampler, **loading), trainer_after(trained))


def taken(loader, number):
    """The first batches; the iterator lives on, as Lightning's does."""
    iterator = iter(loader)
    return iterator, [next(iterator).tolist() for _ in range(number)]


# The workers are forked, so this runs in a process of its own: that of all tests has threads of many others.
@pytest.mark.ranks(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_what_the_trainer_has_got_is_saved_and_another_loader_goes_on(rank, size, workers):
    loader = made(num_workers=workers)
    iterator, batches = taken(loader, 2)
    assert batches == [[0, 2], [4, 6]]
    state = loader.state_dict()
    del iterator
    rest = made(trained=2)
    rest.load_state_dict(state)
    rest.sampler.set_epoch(0)  # as Lightning does before each epoch
    assert [batch.tolist() for batch in rest] == [[8, 10], [12, 14], [16, 18]]
    assert (len(loader), len(rest)) == (5, 5)
    assert rest._trainer.fit_loop.epoch_loop.batch_progress.current.ready == 2


@pytest.mark.parametrize(("replicas", "before"), [(1, 4), (3, 2), (4, 1)])
def test_another_number_of_ranks_has_another_number_of_batches_before_the_position(replicas, before):
    loader = made()
    iterator, _ = taken(loader, 2)
    rest = made(replicas=replicas, trained=2)
    rest.load_state_dict(loader.state_dict())
    assert rest._trainer.fit_loop.epoch_loop.batch_progress.current.ready == before
    assert before + len(list(rest)) == len(rest)
    del iterator


def test_the_next_epoch_begins_with_the_last_batch():
    """Lightning knows the length, so it asks for no more."""
    loader = made()
    iterator, _ = taken(loader, len(loader))
    state = loader.state_dict()
    assert (state["epoch"], state["seen"]) == (1, 0)
    rest = made(trained=5)
    rest.load_state_dict(state)
    assert rest._trainer.fit_loop.epoch_loop.batch_progress.current.ready == 5
    rest.sampler.set_epoch(0)
    assert rest.state_dict() == state
    with pytest.raises(StopIteration):
        next(iterator)


def test_an_epoch_that_lightning_has_left_is_not_gone_on_with():
    """As `limit_train_batches` does."""
    loader = made()
    iterator, _ = taken(loader, 2)
    loader.sampler.set_epoch(1)
    _, batches = taken(loader, 1)
    assert batches == [[0, 2]]
    del iterator


def test_another_fit_of_the_same_loader_begins_at_the_begin():
    """As after `lr_find`, or in a sweep."""
    loader = made()
    first, batches = taken(loader, 3)
    loader.sampler.set_epoch(0)
    second, again = taken(loader, 3)
    assert batches == again == [[0, 2], [4, 6], [8, 10]]
    del first, second


def test_several_loaders_leave_the_count_to_lightning():
    """It counts the batches of all of them together, so none of them says where it was."""
    loader = made()
    iterator, _ = taken(loader, 2)
    rest = made(replicas=1, trained=3)
    vars(rest)["_trainer"] = trainer_after(3, loaders=2)
    rest.load_state_dict(loader.state_dict())
    assert rest._trainer.fit_loop.epoch_loop.batch_progress.current.ready == 3
    del iterator


def test_a_loader_is_counted_once():
    """Lightning puts what the strategy has made of a loader into the program's CombinedLoader."""
    loader = made()
    again = counted(loader, trainer_after(0))
    assert type(again._loader) is DataLoader
    assert len([batch.tolist() for batch in again]) == 5


def test_whatever_else_is_asked_the_loader_answers():
    loader = made()
    assert loader.num_workers == 0
    loader.worker_init_fn = torch.manual_seed  # as Lightning does where all workers are to be seeded
    assert loader._loader.worker_init_fn is torch.manual_seed
    assert not hasattr(loader, "no_such_thing")


def test_only_a_training_with_such_a_sampler_is_counted():
    trainer = trainer_after(0)
    plain = DataLoader(range(4), 2)
    assert counted(plain, trainer) is plain
    with_position = made()._loader
    assert type(counted(with_position, trainer)) is CountedLoader
    trainer.training = False
    assert counted(with_position, trainer) is with_position
