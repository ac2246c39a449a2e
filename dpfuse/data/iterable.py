"""ResumableIterableDataset: deals the samples of a data set without a length, from any position, to any ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils.data import IterableDataset, get_worker_info

from dpfuse.arguments import flag, integer
from dpfuse.data.place import Place
from dpfuse.data.position import Resumable

__all__ = ["ResumableIterableDataset"]

Sample = TypeVar("Sample")


class ResumableIterableDataset(Resumable, IterableDataset[Sample]):
    """The samples of this rank from an iterable data set, for `DataLoader(stream, batch_size=…)`; resumes in an epoch.

    In each step all ranks together see the next `num_replicas * batch_size` samples of the data set, and rank r takes
    each `num_replicas`-th of them from r on. So the number of samples is all that has to be saved.

    At the end every sample comes exactly once; nothing is repeated to fill up. So the last batch may be smaller on some
    ranks, and missing on others. Train it with `join()` and `set_gradient_weight(len(batch))`, or leave it out with
    `drop_last=True`.

    Args:
        dataset: yields the same samples in the same order on every rank and in every worker: all of them. If it has
            `set_epoch(epoch)`, that is called before each iteration.
        batch_size: that of the loader. It may differ when a job resumes.
        num_replicas: number of ranks; None is that of the job: of the process group, once there is one.
        rank: this rank; None is that of the job.
        drop_last: whether to leave out what does not fill a batch on every rank.

    Attributes:
        same_on_all_ranks: True; `load_checkpoint` takes the state to another number of ranks.

    Every worker of every rank reads all samples, and drops those of the others; a resumed one reads from the begin.
    So let `dataset` yield what is cheap, such as file names, and decode in the loader's `collate_fn`.

    Raises:
        TypeError, ValueError: an argument that cannot be used; the text names it.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from dpfuse.data import ResumableIterableDataset
        >>> stream = ResumableIterableDataset(range(10), 2, num_replicas=2, rank=1)
        >>> [batch.tolist() for batch in stream.track(DataLoader(stream, batch_size=2))]
        [[1, 3], [5, 7], [9]]
        >>> stream.load_state_dict({"epoch": 1, "seen": 4})
        >>> [batch.tolist() for batch in stream.track(DataLoader(stream, batch_size=2))]
        [[5, 7], [9]]

    Source: the trouble is huggingface/transformers#40245.
    """

    def __init__(
        self,
        dataset: Iterable[Sample],
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
    ) -> None:
        if not isinstance(dataset, Iterable) or isinstance(dataset, (str, Iterator)):
            raise TypeError(
                f"dataset must give samples, again for each epoch, got {type(dataset).__name__}; "
                "pass an IterableDataset"
            )
        super().__init__({})
        self.dataset = dataset
        self.batch_size = integer("batch_size", batch_size, 1)
        self._place = Place(num_replicas, rank)
        self.drop_last = flag("drop_last", drop_last)
        # For workers: those that persist have no other way to hear of a new epoch, and where it begins.
        self._epoch_and_start = torch.zeros(2, dtype=torch.int64, device="cpu").share_memory_()
        self._iterated = torch.zeros((), dtype=torch.bool, device="cpu").share_memory_()

    @property
    def num_replicas(self) -> int:
        """The number of ranks that share the samples."""
        return self._place.now()[0]

    @property
    def rank(self) -> int:
        """This rank."""
        return self._place.now()[1]

    def track(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a loader to the training loop, from the position on, and count them.

        A batch counts once the loop has it, however many the workers of the loader have loaded ahead. A loop that was
        left goes on with the next batch when `track` is called again. Behind the last batch the next epoch begins.

        Args:
            loader: a `DataLoader` of this data set, with its `batch_size`.

        Returns:
            An iterator over what `loader` yields.

        Raises:
            ValueError: the loader has another data set or `batch_size`, or may yield batches in another order.
            DPFuseError: `set_epoch()` or `load_state_dict()` was called inside the loop.

        Example: that of the class.
        """
        self._check(loader)
        return self._iterate(loader)

    def _iterate(self, loader: Iterable[Any]) -> Iterator[Any]:
        self._start = self._seen
        self._was_moved()
        together = self.num_replicas * self.batch_size
        try:
            yield from self._counted(loader, lambda: together)
        finally:
            self._was_moved()

    def __iter__(self) -> Iterator[Sample]:
        """Yield the samples of this rank, and of this worker of its loader, from the start of the iteration on."""
        epoch, start = self._epoch_and_start.tolist()
        self._iterated.fill_(True)
        if callable(follow := getattr(self.dataset, "set_epoch", None)):
            follow(epoch)
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        replicas, rank = self._place.now()
        together = replicas * self.batch_size
        own: list[Sample] = []
        # A loader takes a batch from each of its workers in turn. So each worker has every `workers`-th step.
        for index, sample in enumerate(islice(self.dataset, start, None)):
            step, place = divmod(index, together)
            if step % workers == number and place % replicas == rank:
                own.append(sample)
            if place == together - 1:
                yield from own
                own = []
        if not self.drop_last:
            yield from own

    def _was_moved(self) -> None:
        """Tell workers where the next iteration begins. Not while one is running, for a worker may still begin it."""
        self._epoch_and_start.copy_(torch.tensor([self._epoch, self._start], device="cpu"))

    def _check(self, loader: Any) -> None:
        """Raise ValueError unless counting the loader's batches gives the position."""
        if getattr(loader, "dataset", None) is not self:
            raise ValueError(
                f"loader is a {type(loader).__name__} with a {type(getattr(loader, 'dataset', None)).__name__} as its "
                "dataset, expected this one. Pass DataLoader(stream, batch_size=…); accelerate's prepare() would "
                "divide the samples a second time."
            )
        if loader.batch_size != self.batch_size or loader.drop_last or not getattr(loader, "in_order", True):
            raise ValueError(
                f"loader has batch_size={loader.batch_size}, drop_last={loader.drop_last} and in_order="
                f"{getattr(loader, 'in_order', True)}, expected {self.batch_size}, False and True. Give drop_last to "
                "the ResumableIterableDataset: a loader would drop batches on some ranks only."
            )
