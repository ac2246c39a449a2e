"""MicroBatchSampler: deals the samples of a data set to numbered micro-batches, and these to any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any

from torch.utils.data import Dataset, Sampler

from dpfuse.arguments import integer
from dpfuse.data.order import Order
from dpfuse.data.place import Place
from dpfuse.data.position import Resumable
from dpfuse.data.seeded_dataset import EpochIndex
from dpfuse.engine.micro_batches import MicroBatches

__all__ = ["MicroBatchSampler"]


class MicroBatchSampler(Resumable, Sampler[list[int]]):
    """Yields indices of this rank's micro-batches, for `DataLoader(dataset, batch_sampler=…)`.

    In each step, micro-batch `number` has the same samples on any number of ranks: those that follow in the order of
    the epoch, which depends on `seed` and epoch alone. All micro-batches have `batch_size` samples. What is left at the
    end of an epoch fills no step, and is left out; the next epoch has another order.

    Args:
        dataset: any object with a length; not an IterableDataset.
        batch_size: the number of samples in a micro-batch, at least 1.
        fixed_micro_batches: the number of micro-batches in a step, as that of the wrapper.
        num_replicas: number of ranks; None is that of the job.
        rank: this rank; None is that of the job.
        shuffle: whether each epoch has an order of its own.
        seed: of the order; the same on all ranks.

    Attributes:
        same_on_all_ranks: True; `load_checkpoint` takes the state to another number of ranks.

    Raises:
        TypeError, ValueError: an argument that cannot be used; the text names it.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from dpfuse.data import MicroBatchSampler
        >>> samplers = [MicroBatchSampler(range(14), 2, 3, num_replicas=2, rank=r, shuffle=False) for r in (0, 1)]
        >>> [list(each) for each in samplers]
        [[[0, 1], [2, 3], [6, 7], [8, 9]], [[4, 5], [10, 11]]]
        >>> loader = DataLoader(range(14), batch_sampler=samplers[0])
        >>> [[batch.tolist() for batch in step] for step in samplers[0].steps(loader)]
        [[[0, 1], [2, 3]], [[6, 7], [8, 9]]]

    Source: the order is that of `torch.utils.data.DistributedSampler`.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sized,
        batch_size: int,
        fixed_micro_batches: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self._order = Order(
            dataset, shuffle, seed, instead="pass a map-style data set: only there samples have numbers"
        )
        self._samples = self._order.samples
        self._size = integer("batch_size", batch_size, 1)
        self._count = integer("fixed_micro_batches", fixed_micro_batches, 1)
        self._place = Place(num_replicas, rank)
        if (replicas := self._place.now()[0]) > self._count:
            raise ValueError(
                f"fixed_micro_batches must be at least the number of ranks, {replicas}, got {self._count}; make "
                "micro-batches smaller"
            )
        if self._samples < self._step:
            raise ValueError(
                f"dataset must have the samples of a step, {self._count} * {self._size}, got {self._samples}; make "
                "micro-batches smaller"
            )
        facts = {**self._order.facts, "micro_batches": self._count, "batch_size": self._size}
        super().__init__(facts, loop="for batches in sampler.steps(loader)")

    @property
    def _step(self) -> int:
        return self._count * self._size

    def steps(self, loader: Iterable[Any]) -> Iterator[list[Any]]:
        """Yield, for each step from the position on, what a loader gives for this rank's micro-batches.

        A step counts once the loop has it. After the last one the next epoch begins.

        Args:
            loader: a `DataLoader` with this sampler as its `batch_sampler`.

        Returns:
            An iterator over lists, as long as `micro_batches()` of the wrapper gives numbers.

        Raises:
            ValueError: the loader has another sampler, or may yield batches in another order.
            DPFuseError: `set_epoch()` or `load_state_dict()` was called inside the loop.

        Example:
            >>> from torch.utils.data import DataLoader
            >>> from dpfuse.data import MicroBatchSampler
            >>> sampler = MicroBatchSampler(range(8), 1, 4, num_replicas=1, rank=0, shuffle=False)
            >>> for batches in sampler.steps(DataLoader(range(8), batch_sampler=sampler)):
            ...     print(len(batches), sampler.seen)
            4 4
            4 8
            >>> sampler.epoch
            1
        """
        if getattr(loader, "batch_sampler", None) is not self:
            raise ValueError(
                f"loader is a {type(loader).__name__} with a {type(getattr(loader, 'batch_sampler', None)).__name__} "
                "as its batch_sampler, expected this sampler. Pass the loader that was made with batch_sampler=sampler"
            )
        if not getattr(loader, "in_order", True):
            raise ValueError("loader has in_order=False, expected True: the order of batches tells their numbers")
        self._start = self._seen
        steps: Iterator[list[Any]] = self._counted(self._by_step(loader), lambda: self._size * self._count)
        return steps

    def _by_step(self, loader: Iterable[Any]) -> Iterator[list[Any]]:
        batches = iter(loader)
        while own := list(islice(batches, len(self._numbers()))):
            yield own

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the micro-batches from where the iteration began that is running, or the next one will."""
        self._iterated = True
        epoch = self._epoch
        order = self._order.of_epoch(epoch)
        for begin in range(self._start, self._samples - self._step + 1, self._step):
            for number in self._numbers():
                first = begin + number * self._size
                yield [EpochIndex(index, epoch) for index in order[first : first + self._size]]

    def __len__(self) -> int:
        """The number of micro-batches of this rank, from where the iteration began that is running."""
        return (self._samples - self._start) // self._step * len(self._numbers())

    def _numbers(self) -> range:
        replicas, rank = self._place.now()
        return MicroBatches(self._count, replicas).of(rank)
