"""DistributedBatchSampler against real Paddle's batches, under torch's loader, and with arguments without sense."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from dpfuse.paddle.io import DistributedBatchSampler

GOLDEN = Path(__file__).parent.parent / "golden" / "sampler.json"
CASES = [pytest.param(case, id=case["id"]) for case in json.loads(GOLDEN.read_text())]


@pytest.mark.parametrize("case", CASES)
def test_every_rank_gets_paddles_batches(case):
    options = {name: case[name] for name in ("batch_size", "num_replicas", "shuffle", "drop_last")}
    for rank, expected in enumerate(case["ranks"]):
        sampler = DistributedBatchSampler(range(case["n"]), rank=rank, **options)
        assert len(sampler) == expected["len"]
        assert list(sampler) == expected["pass0"]
        assert list(sampler) == expected["pass1"]
        sampler.set_epoch(case["set_epoch"])
        assert list(sampler) == expected["after_set_epoch"]


def test_attributes_are_paddles():
    data = list(range(10))
    sampler = DistributedBatchSampler(data, 4, num_replicas=3, rank=2, drop_last=True)
    assert sampler.dataset is data
    assert (sampler.batch_size, sampler.nranks, sampler.local_rank, sampler.epoch) == (4, 3, 2, 0)
    assert (sampler.num_samples, sampler.total_size) == (4, 12)
    assert (sampler.shuffle, sampler.drop_last) == (False, True)


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_a_loader_with_workers_sees_a_new_order_in_every_pass(workers, persistent):
    data = TensorDataset(torch.arange(13))
    sampler = DistributedBatchSampler(data, 3, num_replicas=2, rank=1, shuffle=True)
    context = "fork" if workers else None
    loader = DataLoader(
        data,
        batch_sampler=sampler,
        num_workers=workers,
        multiprocessing_context=context,
        persistent_workers=persistent,
    )
    passes = [[batch.tolist() for (batch,) in loader] for _ in range(3)]
    assert (len(loader), sampler.epoch) == (3, 3)
    assert passes == [by_the_rule(13, 3, 2, 1, epoch) for epoch in range(3)]
    assert passes[0] != passes[1] != passes[2]


def by_the_rule(samples, batch_size, size, rank, epoch):
    """Paddle's order in its own terms: pad, shuffle by epoch, deal out blocks, split the rest."""
    indices = list(range(samples))
    indices += indices[: -samples % size]
    np.random.RandomState(epoch).shuffle(indices)
    rest = len(indices) % (batch_size * size)
    whole, tail = indices[: len(indices) - rest], indices[len(indices) - rest :]
    own = [i for start in range(rank * batch_size, len(whole), batch_size * size) for i in whole[start:][:batch_size]]
    own += tail[rank * rest // size : (rank + 1) * rest // size]
    return [own[start : start + batch_size] for start in range(0, len(own), batch_size)]


def test_fewer_samples_than_ranks_are_repeated_until_every_rank_has_one():
    batches = [list(DistributedBatchSampler([0, 0], 4, num_replicas=5, rank=rank)) for rank in range(5)]
    assert batches == [[[0]], [[1]], [[0]], [[1]], [[0]]]


def own_batches(rank, size):
    sampler = DistributedBatchSampler(range(8), 2)
    return sampler.nranks, sampler.local_rank, list(sampler)


def test_ranks_are_taken_from_the_job(ranks):
    assert ranks(own_batches) == [(2, 0, [[0, 1], [4, 5]]), (2, 1, [[2, 3], [6, 7]])]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))

    def __len__(self):
        return 3


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"dataset": Stream()}, TypeError, "Stream"),
        ({"dataset": iter([1])}, TypeError, "must have samples and a length"),
        ({"dataset": []}, ValueError, "empty"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"batch_size": 2.0}, TypeError, "batch_size must be an integer, got 2.0 of type float"),
        ({"batch_size": True}, TypeError, "batch_size"),
        ({"num_replicas": 0}, ValueError, "num_replicas must be at least 1"),
        ({"num_replicas": "2"}, TypeError, "num_replicas"),
        ({"rank": 2}, ValueError, "rank must be below num_replicas=2, got 2"),
        ({"rank": -1}, ValueError, "rank must be at least 0"),
        ({"rank": 0.5}, TypeError, "rank"),
        ({"shuffle": 1}, TypeError, "shuffle must be True or False, got 1"),
        ({"drop_last": None}, TypeError, "drop_last"),
    ],
)
def test_arguments_without_sense_are_named(change, error, text):
    arguments = {"dataset": range(4), "batch_size": 2, "num_replicas": 2, "rank": 0, **change}
    with pytest.raises(error, match=text):
        DistributedBatchSampler(**arguments)


@pytest.mark.parametrize(("epoch", "error"), [(-1, ValueError), (2**32, ValueError), (1.5, TypeError)])
def test_an_epoch_without_sense_is_refused(epoch, error):
    sampler = DistributedBatchSampler(range(4), 2, 1, 0)
    with pytest.raises(error, match="epoch must be"):
        sampler.set_epoch(epoch)
    assert sampler.epoch == 0


def test_the_last_epoch_can_be_set():
    sampler = DistributedBatchSampler(range(4), 4, 1, 0, shuffle=True)
    sampler.set_epoch(2**32 - 1)
    assert list(sampler) == by_the_rule(4, 4, 1, 0, 2**32 - 1)
