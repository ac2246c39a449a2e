"""The data of one fit, evaluate or predict: loader, steps, and each rank's samples. Runs no network."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, auto
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from dpfuse import get_rank
from dpfuse.arguments import integer
from dpfuse.paddle.collectives import gather_rows, world_size
from dpfuse.paddle.io import DistributedBatchSampler

__all__ = ["Batches", "Distribution", "Shares"]


class Distribution(Enum):
    """The distribution of a loader's samples over the ranks."""

    SHARED = auto()  # each rank has a share with known sample numbers
    WHOLE = auto()  # every rank gets all samples
    UNKNOWN = auto()  # a user's loader with an unknown order


class Batches:
    """The data given to `fit`, `evaluate` or `predict`, as an iterable of batches.

    Args:
        data: a dataset, which gets a DistributedBatchSampler; or a DataLoader or another iterable of batches, used as
            it is. All options are for a dataset.
        epoch: the first epoch; it seeds the order.
    """

    def __init__(
        self,
        data: Any,
        name: str,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        num_workers: int = 0,
        epoch: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.name = name
        self.batch_size = batch_size
        integer("num_workers", num_workers, 0)
        if isinstance(data, Dataset):
            if isinstance(data, IterableDataset) and world_size() > 1:
                raise TypeError(
                    f"{name} is an IterableDataset, which cannot be distributed to {world_size()} ranks; expected a "
                    "dataset with a length. Pass a DataLoader over one that gives each rank its own samples."
                )
            options: dict[str, Any] = {"num_workers": num_workers, "pin_memory": pin_memory}
            options["persistent_workers"] = num_workers > 0  # over the epochs of fit
            if isinstance(data, IterableDataset):
                options.update(batch_size=batch_size, drop_last=drop_last)
            else:
                sampler = DistributedBatchSampler(data, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last)
                sampler.set_epoch(epoch)
                options["batch_sampler"] = sampler
            self.loader: Iterable[Any] = DataLoader(data, **options)
        elif isinstance(data, Iterable):
            self.loader = data
        else:
            raise TypeError(f"{name} must be a torch Dataset, a DataLoader or an iterable of batches, got {data!r}")
        try:
            self.steps: int | None = len(self.loader)  # type: ignore[arg-type]
        except TypeError:
            self.steps = None
        self.distribution = self._distribution()

    def _distribution(self) -> Distribution:
        batches = getattr(self.loader, "batch_sampler", None)
        samples = getattr(batches, "sampler", None)
        # Exactly these types: a subclass may use another order.
        if type(batches) is DistributedBatchSampler:
            replicas, rank = batches.nranks, batches.local_rank
        elif type(batches) is BatchSampler and type(samples) is DistributedSampler:
            replicas, rank = samples.num_replicas, samples.rank
        elif type(batches) is BatchSampler and type(samples) in (RandomSampler, SequentialSampler):
            return Distribution.WHOLE
        else:
            return Distribution.UNKNOWN
        if replicas == 1:
            return Distribution.WHOLE
        if not getattr(self.loader, "in_order", True):
            return Distribution.UNKNOWN
        return Distribution.SHARED if (replicas, rank) == (world_size(), get_rank()) else Distribution.UNKNOWN

    @property
    def facts(self) -> str:
        """The facts that must be equal on all ranks, one per line, so that the ranks' shares are the whole data."""
        if self.distribution is not Distribution.SHARED:
            return f"{self.name}: any batches, {self.distribution.name.lower()}"
        loader: Any = self.loader
        parts = [loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
        shuffled = any(getattr(part, "shuffle", False) for part in parts)
        settings = ["batch_size", "shuffle", "drop_last", *(["epoch", "seed"] if shuffled else [])]
        lines = [f"{key} = {getattr(part, key)}" for part in parts for key in settings if hasattr(part, key)]
        lines = [f"{self.steps} batches, shared", f"{len(loader.dataset)} samples", *lines]
        return "\n".join(f"{self.name}: {line}" for line in lines)

    def epoch(self, limit: int | None, *, looks_ahead: bool) -> Iterator[tuple[Any, bool]]:
        """Yield the batches of a training epoch, or its first `limit`, each with a flag for the last one.

        Then move torch's DistributedSampler to its next epoch. DistributedBatchSampler does this by itself.

        Args:
            looks_ahead: whether the flag is needed where only the next batch tells it. A loader may give the same
                memory again, or choose samples by the weights, so no batch is read too early without need.
        """
        loader: Any = self.loader
        batches = islice(loader, limit)
        if self.distribution is not Distribution.UNKNOWN and self.steps:
            last = self.steps if limit is None else min(limit, self.steps)
            yield from ((batch, number == last) for number, batch in enumerate(batches, 1))
        elif not looks_ahead:
            yield from ((batch, False) for batch in batches)
        else:
            # The length may be missing or wrong. Only a next batch shows that a batch is not the last.
            held = next(batches, self)
            while held is not self:
                ahead = next(batches, self)
                yield held, ahead is self
                held = ahead
        sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(sampler.epoch + 1)

    def warn_of_distribution(self, training: bool = False, stacklevel: int = 3) -> None:
        """Warn on rank 0 if the loader does something unexpected on several ranks."""
        if world_size() == 1 or get_rank() != 0:
            return
        shuffled = isinstance(getattr(self.loader, "sampler", None), RandomSampler)
        if training and self.distribution is Distribution.WHOLE:
            problem = "gives every rank all samples, so that an epoch takes as long as on one rank"
        elif not training and self.distribution is Distribution.WHOLE and shuffled:
            problem = "shuffles, so that each rank's results are those of its own batches, in its own order"
        elif not training and self.distribution is Distribution.UNKNOWN:
            problem = "has an unknown order, so that each rank's results are those of its own batches"
        else:
            return
        warnings.warn(
            f"{self.name} {problem}. Pass the dataset itself, or a DataLoader with "
            "batch_sampler=DistributedBatchSampler(…).",
            UserWarning,
            stacklevel=stacklevel,
        )


class Shares:
    """Combines what the ranks computed on their shares: every sample once, in the order of the dataset."""

    def __init__(self, batches: Batches) -> None:
        loader: Any = batches.loader
        # A copy, because each pass over the original changes its shuffle order.
        self._numbers: Iterator[list[int]] = iter(copy.copy(loader.batch_sampler))
        self._done = np.zeros(len(loader.dataset), dtype=bool)
        self.batch_size = int(loader.batch_sampler.batch_size)

    def gather(self, tensors: Sequence[Tensor]) -> tuple[np.ndarray[Any, Any], list[Tensor]]:
        """Exchange the rows of one step: tensors of [samples of this rank's batch, …].

        Returns:
            The numbers of samples that appear for the first time, ascending, and their rows.

        Raises:
            DPFuseError: As for `gather_rows`, on every rank.
        """
        own = torch.tensor(next(self._numbers), device="cpu")
        numbers, *rows = gather_rows([own.to(tensors[0].device), *tensors], len(own))
        unique, first = np.unique(numbers.cpu().numpy(), return_index=True)
        new = ~self._done[unique]
        self._done[unique] = True
        where = torch.from_numpy(first[new]).to(tensors[0].device)
        return unique[new], [row[where] for row in rows]
