"""SeededDataset: random numbers of a sample depend on the sample and the epoch, not on the worker or the rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import Dataset

from dpfuse.arguments import integer
from dpfuse.engine.random_states import get_random_state, seed_by, set_random_state

__all__ = ["EpochIndex", "SeededDataset"]


class EpochIndex(int):
    """The index of a sample, which knows the epoch for which it is loaded."""

    epoch: int

    def __new__(cls, index: int, epoch: int) -> EpochIndex:
        made = super().__new__(cls, index)
        made.epoch = epoch
        return made

    def __reduce__(self) -> tuple[type[EpochIndex], tuple[int, int]]:
        return EpochIndex, (int(self), self.epoch)


class SeededDataset(Dataset[Any]):
    """Seeds the global generators of torch, Python and NumPy before each sample, and restores them after it.

    An augmentation then draws the same for a sample in an epoch, whichever worker of whichever rank loads it. A
    `MicroBatchSampler` tells the epoch to the data set that the loader has, so this must be the outermost one, and not
    inside of a `Subset`. With other samplers the epoch is 0.

    Args:
        dataset: of numbered samples.
        seed: 0 or more.

    Raises:
        TypeError, ValueError: `seed` is no such number.

    Example:
        >>> import torch
        >>> from dpfuse.data import SeededDataset
        >>> class Noisy:
        ...     def __len__(self):
        ...         return 3
        ...     def __getitem__(self, index):
        ...         return index + torch.rand(()).item()
        >>> seeded = SeededDataset(Noisy(), seed=5)
        >>> seeded[1] == seeded[1], len(seeded)
        (True, 3)
    """

    def __init__(self, dataset: Any, seed: int = 0) -> None:
        if not hasattr(dataset, "__getitem__"):
            got = f"{dataset!r:.100} of type {type(dataset).__name__}"
            raise TypeError(f"dataset must have numbered samples, with __getitem__(), got {got}")
        self.dataset = dataset
        self._seed = integer("seed", seed, 0)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        with _states_kept():
            seed_by(self._seed, getattr(index, "epoch", 0), int(index), on_gpus=False)
            return self.dataset[int(index)]


@contextmanager
def _states_kept() -> Iterator[None]:
    """Restore the generators of this process at the end, but those of GPUs."""
    before = get_random_state(on_gpus=False)
    try:
        yield
    finally:
        set_random_state(before)
