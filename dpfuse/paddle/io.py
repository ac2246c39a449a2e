"""`paddle.io`: distributes the samples of a dataset to the ranks. Torch's DataLoader loads them."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from dpfuse import DPFuseError, get_rank, get_world_size
from dpfuse.arguments import flag, integer
from dpfuse.paddle.counterparts import lacks

__all__ = ["DataLoader", "Dataset", "DistributedBatchSampler"]

__getattr__ = lacks(__name__)


class DistributedBatchSampler(Sampler[list[int]]):
    """Yields lists of sample indices for one rank, for `torch.utils.data.DataLoader(dataset, batch_sampler=...)`.

    The samples are padded with the first ones until every rank gets the same number. Ranks get blocks of `batch_size`
    samples in turn, and equal parts of the rest. So one step of all ranks takes the samples of one batch of
    `num_replicas * batch_size` on a single process.

    With `shuffle`, each iteration begins a new epoch with a new order, which is equal on all ranks. `set_epoch` is
    needed only to resume.

    Args:
        dataset: any object with a length; not an IterableDataset.
        batch_size: samples per batch of this rank, at least 1.
        num_replicas: number of ranks; None reads it from the environment.
        rank: this rank; None reads it from the environment.
        shuffle: whether to shuffle before the samples are distributed.
        drop_last: whether to leave out this rank's last batch if it is short.

    Raises:
        TypeError: An argument has the wrong type, or the dataset has no length.
        ValueError: A number is out of range, or the dataset is empty.
        DPFuseError: A group of another number of ranks was made since; raised by an iteration.

    Example:
        >>> from dpfuse.paddle.io import DistributedBatchSampler
        >>> list(DistributedBatchSampler(range(10), batch_size=2, num_replicas=2, rank=1))
        [[2, 3], [6, 7], [9]]

    Source: `paddle.io.DistributedBatchSampler`; the order is the same, index by index.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sized,
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
    ) -> None:
        if isinstance(dataset, (str, IterableDataset)) or not isinstance(dataset, Sized):
            raise TypeError(
                f"dataset must have samples and a length, got {type(dataset).__name__}, which cannot be distributed by "
                "index; pass a map-style dataset, or split the stream by rank inside it"
            )
        self.dataset = dataset
        self.batch_size = integer("batch_size", batch_size, 1)
        self.nranks = integer("num_replicas", get_world_size() if num_replicas is None else num_replicas, 1)
        self._of_the_job = num_replicas is None
        self.local_rank = integer("rank", get_rank() if rank is None else rank, 0)
        if self.local_rank >= self.nranks:
            raise ValueError(f"rank must be below num_replicas={self.nranks}, got {self.local_rank}")
        if len(dataset) == 0:
            raise ValueError("dataset is empty; expected at least one sample, to pad with")
        self.shuffle = flag("shuffle", shuffle)
        self.drop_last = flag("drop_last", drop_last)
        self.epoch = 0
        self.num_samples = -(-len(dataset) // self.nranks)
        self.total_size = self.num_samples * self.nranks

    def __iter__(self) -> Iterator[list[int]]:
        if self._of_the_job and dist.is_initialized() and dist.get_world_size() != self.nranks:
            raise DPFuseError(
                f"the sampler was made for {self.nranks} rank(s), and the process group has {dist.get_world_size()}: "
                "ranks would get the same samples. Make the sampler after init_parallel_env(), or pass num_replicas."
            )
        indices = np.resize(np.arange(len(self.dataset)), self.total_size)
        if self.shuffle:
            np.random.RandomState(self.epoch).shuffle(indices)
            self.epoch += 1
        dealt = self.total_size // (self.nranks * self.batch_size) * self.nranks * self.batch_size
        rounds = indices[:dealt].reshape(-1, self.nranks, self.batch_size)
        rest = indices[dealt:].reshape(self.nranks, -1)
        own = np.concatenate([rounds[:, self.local_rank].ravel(), rest[self.local_rank]]).tolist()
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            yield own[start : start + self.batch_size]

    def __len__(self) -> int:
        """Return the number of batches of this rank, which is the same on all ranks."""
        short = 0 if self.drop_last else self.batch_size - 1
        return (self.num_samples + short) // self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Use the order of `epoch` in the next iteration.

        Args:
            epoch: the seed of the order, from 0 to 2**32 - 1.

        Raises:
            TypeError, ValueError: `epoch` is no such number.
        """
        epoch = integer("epoch", epoch, 0)
        if epoch >= 2**32:
            raise ValueError(f"epoch must be below 2**32, got {epoch}")
        self.epoch = epoch
