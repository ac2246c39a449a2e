"""The order of the samples of a data set with a length: by seed and epoch, the same on all ranks."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch.utils.data import Dataset, DistributedSampler, IterableDataset

from dpfuse.arguments import flag, integer

__all__ = ["Order"]


class Order:
    """The order of the samples in each epoch.

    Args:
        instead: what to do about a data set without a length; the end of an error's text.

    Attributes:
        samples: the number of samples.
        facts: what the order depends on, by name.

    Raises:
        TypeError, ValueError: an argument that cannot be used; the text names it.

    Source: the order is that of `torch.utils.data.DistributedSampler`.
    """

    def __init__(self, dataset: Dataset[Any] | Sized, shuffle: bool, seed: int, *, instead: str) -> None:
        if isinstance(dataset, (str, IterableDataset)) or not isinstance(dataset, Sized):
            raise TypeError(f"dataset must have samples and a length, got {type(dataset).__name__}; {instead}")
        self._sampler: DistributedSampler[Any] = DistributedSampler(
            dataset,  # type: ignore[arg-type]  # anything with a length
            num_replicas=1,
            rank=0,
            shuffle=flag("shuffle", shuffle),
            seed=integer("seed", seed, 0),
        )
        self.samples = len(dataset)
        self.facts = {"samples": self.samples, "shuffle": shuffle, "seed": seed}

    def of_epoch(self, epoch: int) -> list[int]:
        """Return the indices of all samples, in the order of an epoch."""
        self._sampler.set_epoch(epoch)
        return list(self._sampler)
