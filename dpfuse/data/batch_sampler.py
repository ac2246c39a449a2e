"""ResumableBatchSampler: deals the samples of a data set with a length, from any position, to any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

from torch.utils.data import Dataset, Sampler

from dpfuse.arguments import flag, integer
from dpfuse.data.order import Order
from dpfuse.data.place import Place
from dpfuse.data.position import Resumable

__all__ = ["ResumableBatchSampler"]


class ResumableBatchSampler(Resumable, Sampler[list[int]]):
    """Yields indices of this rank's batches, for `DataLoader(dataset, batch_sampler=…)`, and resumes inside an epoch.

    The order is that of torch's `DistributedSampler`: by `seed` and epoch, equal on all ranks, and rank r takes each
    `num_replicas`-th sample from r on. So in each step all ranks together see the next `num_replicas * batch_size`
    samples of the order. Their number is all that has to be saved: another number of ranks goes on from there.

    In an epoch every sample comes exactly once: nothing is repeated to fill up. All ranks get as many batches, and none
    is empty: at the end batches may be smaller, and of different sizes. `set_gradient_weight(len(batch))` then makes
    the mean over the samples right. Only where this cannot be, since fewer samples are left than there are ranks, or
    `batch_size` is 1, the last ranks have one batch less; use `join()` there, or `drop_last=True`.

    Args:
        dataset: any object with a length; not an IterableDataset.
        batch_size: the most samples in a batch of this rank, at least 1. It may differ when a job resumes.
        num_replicas: number of ranks; None is that of the job: of the process group, once there is one.
        rank: this rank; None is that of the job.
        shuffle: whether each epoch has an order of its own.
        seed: of the order; the same on all ranks.
        drop_last: whether to leave out what does not fill a batch on every rank.

    Attributes:
        same_on_all_ranks: True; `load_checkpoint` takes the state to another number of ranks.

    Raises:
        TypeError, ValueError: an argument that cannot be used; the text names it.

    Example:
        >>> from dpfuse.data import ResumableBatchSampler
        >>> sampler = ResumableBatchSampler(range(11), 2, num_replicas=2, rank=0, shuffle=False)
        >>> list(sampler)
        [[0, 2], [4, 6], [8, 10]]
        >>> list(ResumableBatchSampler(range(11), 2, num_replicas=2, rank=1, shuffle=False))
        [[1, 3], [5, 7], [9]]
        >>> sampler.load_state_dict({"epoch": 0, "seen": 4, "samples": 11, "shuffle": False, "seed": 0})
        >>> list(sampler)
        [[4, 6], [8, 10]]

    Source: the order is that of `torch.utils.data.DistributedSampler`; the trouble is huggingface/transformers#40245.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sized,
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self._order = Order(
            dataset,
            shuffle,
            seed,
            instead="pass a map-style data set, or wrap an iterable one in dpfuse.data.ResumableIterableDataset",
        )
        super().__init__(self._order.facts)
        # No attribute batch_size: accelerate takes one as the promise that all batches have that size, and else repeats
        # samples.
        self._most = integer("batch_size", batch_size, 1)
        self._place = Place(num_replicas, rank)
        self.drop_last = flag("drop_last", drop_last)
        self._for_all = False  # whether to yield the batches of all ranks, in turn

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
            loader: a `DataLoader` with this sampler as its `batch_sampler`, or what accelerate's `prepare` made of one.

        Returns:
            An iterator over what `loader` yields.

        Raises:
            ValueError: the loader has another sampler, or may yield batches in another order.
            DPFuseError: `set_epoch()` or `load_state_dict()` was called inside the loop.

        Example:
            >>> from torch.utils.data import DataLoader
            >>> from dpfuse.data import ResumableBatchSampler
            >>> sampler = ResumableBatchSampler(range(6), 2, shuffle=False)
            >>> loader = DataLoader(range(6), batch_sampler=sampler)
            >>> for batch in sampler.track(loader):
            ...     print(batch, sampler.seen)
            ...     if sampler.seen == 4:
            ...         break
            tensor([0, 1]) 2
            tensor([2, 3]) 4
            >>> [batch.tolist() for batch in sampler.track(loader)], sampler.epoch
            ([[4, 5]], 1)
        """
        self._for_all = self._is_dealt_outside(loader)
        return self._iterate(loader)

    def _iterate(self, loader: Iterable[Any]) -> Iterator[Any]:
        self._start = self._seen
        if callable(follow := getattr(loader, "set_epoch", None)):
            follow(self._epoch)  # accelerate's loaders set the epoch when they begin: from 0 on in each process
        sizes = self._sizes(self._start)
        yield from self._counted(loader, lambda: next(sizes))

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches from where the iteration began that is running, or the next one will."""
        self._iterated = True
        begin, (replicas, own) = self._start, self._place.now()
        order = self._order.of_epoch(self._epoch)
        for size in self._sizes(begin):
            together = order[begin : begin + size]
            for rank in range(replicas) if self._for_all else (own,):
                if batch := together[rank::replicas]:
                    yield batch
            begin += size

    def __len__(self) -> int:
        """The number of batches of this rank, from where the iteration began that is running, or the next one will."""
        return self._batches(self._start)

    @property
    def batches_of_epoch(self) -> int:
        """The number of batches of this rank in a whole epoch, wherever the position is."""
        return self._batches(0)

    def _batches(self, begin: int) -> int:
        sizes = [*self._sizes(begin)]
        if not sizes:
            return 0
        replicas, rank = self._place.now()
        with_last = min(sizes[-1], replicas)  # ranks that have a batch in the last step
        if self._for_all:
            return (len(sizes) - 1) * replicas + with_last
        return len(sizes) - (rank >= with_last)

    def _sizes(self, begin: int) -> Iterator[int]:
        """The number of samples that all ranks together get in each step, from a position in the epoch on."""
        replicas, _ = self._place.now()
        step = self._most * replicas
        full, rest = divmod(max(self._order.samples - begin, 0), step)
        if rest == 0 or self.drop_last:
            yield from (step for _ in range(full))
        elif rest < replicas and full and self._most > 1:
            # Each rank gets one sample in the last step, and some ranks one less in the step before.
            yield from (step for _ in range(full - 1))
            yield step - replicas + rest
            yield replicas
        else:
            yield from (step for _ in range(full))
            yield rest

    def _is_dealt_outside(self, loader: Any) -> bool:
        """Does a batch sampler around this one, such as accelerate's, give each rank one of `num_replicas` batches?

        Raises:
            ValueError: this is not the sampler of the loader.
        """
        if not getattr(loader, "in_order", True):
            raise ValueError("loader has in_order=False, expected True: a position counts batches from the first on")
        if getattr(loader, "slice_fn", None) is not None:
            raise ValueError(
                "loader sends the batches of rank 0 to the other ranks, which would lose their own; expected a loader "
                "on each rank. Pass DataLoaderConfiguration(dispatch_batches=False) to the Accelerator."
            )
        outer = getattr(loader, "batch_sampler", None)
        if outer is self:
            return False
        processes = getattr(outer, "num_processes", None)
        if getattr(outer, "batch_sampler", None) is not self or processes is None:
            raise ValueError(
                f"loader is a {type(loader).__name__} with a {type(outer).__name__} as its batch_sampler, expected "
                "this sampler. Pass the loader that was made with batch_sampler=sampler, or what accelerate's "
                "prepare() made of it; for skipping batches there is load_state_dict()."
            )
        if processes != self.num_replicas:
            raise ValueError(
                f"loader gives batches to {processes} ranks, the sampler has num_replicas={self.num_replicas}; "
                "expected the same. Leave num_replicas out."
            )
        return True
