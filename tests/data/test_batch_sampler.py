"""How samples are dealt to ranks, from any position; without processes."""

from __future__ import annotations

from itertools import chain, product

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import dpfuse
from dpfuse.data import ResumableBatchSampler
from tests.data.streams import Stream


def flat(lists):
    return [*chain.from_iterable(lists)]


def at(seen, length, batch_size, size, rank, **options):
    sampler = ResumableBatchSampler(range(length), batch_size, size, rank, seed=3, **options)
    sampler.load_state_dict({"epoch": 2, "seen": seen, "samples": length, "shuffle": True, "seed": 3})
    return sampler


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_from_each_position_each_sample_comes_once_in_as_many_batches_on_each_rank(size, batch_size):
    for length in range(23):
        order = [*at(0, length, max(length, 1), 1, 0)]
        for seen in range(length + 1):
            parts = []
            for rank in range(size):
                sampler = at(seen, length, batch_size, size, rank)
                parts.append([*sampler])
                assert len(parts[-1]) == len(sampler)
                assert sampler.batches_of_epoch == len(at(0, length, batch_size, size, rank))
                assert all(1 <= len(batch) <= batch_size for batch in parts[-1])
            given = sorted(index for part in parts for batch in part for index in batch)
            assert given == sorted(flat(order)[seen:])
            numbers = [len(part) for part in parts]
            if batch_size > 1 and length - seen >= size:
                assert len({*numbers}) == 1
            else:
                assert max(numbers) - min(numbers) <= 1
                assert numbers == sorted(numbers, reverse=True)


def test_what_was_seen_is_the_begin_of_the_order_whatever_the_number_of_ranks():
    whole = flat(at(0, 50, 50, 1, 0))
    for size, batch_size in product((2, 3), (2, 5)):
        steps = zip(*(at(0, 50, batch_size, size, rank) for rank in range(size)), strict=True)
        seen = []
        for step in steps:
            seen += flat(step)
            assert sorted(seen) == sorted(whole[: len(seen)])


@pytest.mark.parametrize("drop_last", [False, True])
def test_full_batches_are_those_of_torchs_sampler(drop_last):
    for length, size, epoch in product((24, 29), (1, 2, 3), (0, 4)):
        for rank in range(size):
            theirs = DistributedSampler(range(length), size, rank, seed=7)
            ours = ResumableBatchSampler(range(length), 4, size, rank, seed=7, drop_last=drop_last)
            for sampler in (theirs, ours):
                sampler.set_epoch(epoch)
            full = length // (4 * size)
            expected = [*BatchSampler(theirs, 4, drop_last=False)][:full]
            if drop_last or length % (4 * size) == 0:
                assert [*ours] == expected
            else:
                assert [*ours][: full - 1] == expected[: full - 1]


def test_an_epoch_has_an_order_of_its_own_and_ends_by_itself():
    sampler = ResumableBatchSampler(range(9), 2, 1, 0)
    loader = DataLoader(range(9), batch_sampler=sampler)
    first, second = ([batch.tolist() for batch in sampler.track(loader)] for _ in range(2))
    assert first != second
    assert sorted(flat(first)) == sorted(flat(second)) == [*range(9)]
    assert sampler.epoch == 2
    sampler.set_epoch(0)
    assert [batch.tolist() for batch in sampler.track(loader)] == first


def test_a_new_epoch_begins_at_its_first_sample_and_the_same_goes_on():
    sampler = ResumableBatchSampler(range(8), 2, 1, 0, shuffle=False)
    loader = DataLoader(range(8), batch_sampler=sampler)
    next(sampler.track(loader))
    sampler.set_epoch(0)
    assert sampler.seen == 2
    assert next(sampler.track(loader)).tolist() == [2, 3]
    sampler.set_epoch(1)
    assert (sampler.seen, next(sampler.track(loader)).tolist()) == (0, [0, 1])


def test_a_state_from_behind_the_last_batch_gives_no_batch_and_then_the_next_epoch():
    """The state of a program that saves in its last step."""
    sampler = ResumableBatchSampler(range(6), 3, 1, 0)
    states = [sampler.state_dict() for _ in sampler.track(DataLoader(range(6), batch_sampler=sampler))]
    resumed = ResumableBatchSampler(range(6), 3, 1, 0)
    resumed.load_state_dict(states[-1])
    loader = DataLoader(range(6), batch_sampler=resumed)
    assert (resumed.epoch, len(loader), [*resumed.track(loader)]) == (0, 0, [])
    assert (resumed.epoch, resumed.seen, len(loader)) == (1, 0, 2)


def test_the_length_stays_that_of_the_loop_which_is_running():
    sampler = ResumableBatchSampler(range(10), 2, 1, 0)
    loader = DataLoader(range(10), batch_sampler=sampler)
    assert [len(loader) for _ in sampler.track(loader)] == [5] * 5
    for _ in sampler.track(loader):
        break
    assert len(loader) == 4


def test_samples_are_dealt_as_the_job_says(group):
    sampler = ResumableBatchSampler(range(4), 2)
    assert (sampler.num_replicas, sampler.rank) == (1, 0)


def test_the_seed_of_the_process_does_not_matter():
    orders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        orders.append([*ResumableBatchSampler(range(20), 4, 2, 1)])
    assert orders[0] == orders[1]


@pytest.mark.parametrize(
    ("error", "words", "changes"),
    [
        (TypeError, "dataset must have samples and a length, got Stream", {"dataset": Stream(3)}),
        (TypeError, "dataset must have samples and a length, got generator", {"dataset": (n for n in range(3))}),
        (TypeError, "batch_size must be an integer, got 2.0", {"batch_size": 2.0}),
        (ValueError, "batch_size must be at least 1, got 0", {"batch_size": 0}),
        (ValueError, "num_replicas must be at least 1, got 0", {"num_replicas": 0}),
        (ValueError, "rank must be below num_replicas=2, got 2", {"rank": 2}),
        (TypeError, "shuffle must be True or False, got 1", {"shuffle": 1}),
        (TypeError, "drop_last must be True or False, got None", {"drop_last": None}),
        (ValueError, "seed must be at least 0, got -1", {"seed": -1}),
    ],
)
def test_bad_arguments_are_named(error, words, changes):
    given = {"dataset": range(3), "batch_size": 2, "num_replicas": 2, "rank": 0} | changes
    with pytest.raises(error, match=words):
        ResumableBatchSampler(**given)


@pytest.mark.parametrize(
    ("error", "words", "changes"),
    [
        (ValueError, r"saved with samples=8, got samples=7: the order of the samples would be another", {"samples": 8}),
        (ValueError, "saved with seed=1, got seed=0", {"seed": 1}),
        (ValueError, "saved with shuffle=False, got shuffle=True", {"shuffle": False}),
        (TypeError, "seen must be an integer, got 1.5", {"seen": 1.5}),
        (ValueError, "epoch must be at least 0, got -1", {"epoch": -1}),
    ],
)
def test_a_state_that_does_not_fit_is_refused(error, words, changes):
    sampler = ResumableBatchSampler(range(7), 2, 1, 0)
    with pytest.raises(error, match=words):
        sampler.load_state_dict(sampler.state_dict() | changes)
    assert (sampler.epoch, sampler.seen) == (0, 0)


def test_a_state_of_another_class_is_refused():
    sampler = ResumableBatchSampler(range(7), 2, 1, 0)
    for state in ({"epoch": 1}, [1], None):
        with pytest.raises(ValueError, match=r"the state must have .*; pass what state_dict"):
            sampler.load_state_dict(state)


def test_a_position_that_no_loop_counts_is_not_saved():
    sampler = ResumableBatchSampler(range(7), 2, 1, 0)
    loader = DataLoader(range(7), batch_sampler=sampler)
    assert sampler.state_dict()["seen"] == 0
    next(iter(loader))
    with pytest.raises(dpfuse.DPFuseError, match="batches were taken that were not counted"):
        sampler.state_dict()
    for _ in sampler.track(loader):
        next(iter(loader))  # a look at some samples moves nothing
    assert sampler.state_dict()["epoch"] == 1


def test_the_position_is_not_set_inside_a_loop():
    sampler = ResumableBatchSampler(range(7), 2, 1, 0)
    loader = DataLoader(range(7), batch_sampler=sampler)
    loop = sampler.track(loader)
    next(loop)
    sampler.set_epoch(3)
    with pytest.raises(dpfuse.DPFuseError, match=r"called inside the loop `for batch in sampler\.track"):
        next(loop)
    assert (sampler.epoch, sampler.seen) == (3, 0)


def test_loaders_that_would_be_counted_wrongly_are_refused():
    sampler = ResumableBatchSampler(range(7), 2, 1, 0)
    loader = DataLoader(range(7), batch_sampler=sampler, in_order=False)
    with pytest.raises(ValueError, match="in_order=False, expected True"):
        sampler.track(loader)
    for other in (DataLoader(range(7), batch_size=2), [[1, 2]]):
        with pytest.raises(ValueError, match="as its batch_sampler, expected this sampler"):
            sampler.track(other)
