"""Data sets whose samples are their own numbers, and the two classes over them with one way of use."""

from __future__ import annotations

from torch.utils.data import DataLoader, IterableDataset

from dpfuse.data import ResumableBatchSampler, ResumableIterableDataset


class Stream(IterableDataset):
    """The numbers below `length`, turned by the epoch: another order in each."""

    def __init__(self, length):
        self.length = length
        self.epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([(number + self.epoch) % self.length for number in range(self.length)])


def map_style(length, batch_size, size, rank, **loading):
    sampler = ResumableBatchSampler(range(length), batch_size, size, rank, seed=5)
    return sampler, DataLoader(range(length), batch_sampler=sampler, **loading)


def iterable(length, batch_size, size, rank, **loading):
    stream = ResumableIterableDataset(Stream(length), batch_size, size, rank)
    return stream, DataLoader(stream, batch_size=batch_size, **loading)


KINDS = {"map": map_style, "iterable": iterable}
