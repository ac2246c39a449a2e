"""The loader of a `ResumableBatchSampler` in Lightning's Trainer, whose loop it is. Imports no Lightning package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from dpfuse.data import ResumableBatchSampler

__all__ = ["CountedLoader", "counted"]


class CountedLoader:
    """Counts the batches that the Trainer gets. Lightning saves and loads the state of a loader that has one.

    So a fit that goes on inside an epoch trains each sample of it once, also on another number of ranks. Whatever else
    is asked of this object, the loader answers.

    Args:
        loader: has a `ResumableBatchSampler`.
        trainer: gets the batches.
    """

    def __init__(self, loader: DataLoader[Any], trainer: Any) -> None:
        vars(self).update(_loader=loader, _position=loader.batch_sampler, _trainer=trainer, _goes_on=False)

    _loader: DataLoader[Any]
    _position: ResumableBatchSampler
    _trainer: Any
    _goes_on: bool  # whether a position was loaded, from which the next epoch goes on

    def __getattr__(self, name: str) -> Any:
        if name in ("_loader", "_position", "_trainer", "_goes_on"):  # of an object that is being copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)

    @property
    def sampler(self) -> CountedLoader:
        """What Lightning tells that an epoch begins."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, or go on in the one whose position was loaded just now."""
        if not self._goes_on:
            self._position.set_epoch(epoch + 1)  # that of now would go on where an earlier fit has left it
            self._position.set_epoch(epoch)
        vars(self)["_goes_on"] = False

    def __len__(self) -> int:
        """The number of batches in a whole epoch: Lightning's own count goes on where it was."""
        return self._position.batches_of_epoch

    def __iter__(self) -> Iterator[Any]:
        batches = self._position.track(self._loader)
        left = 0
        for batch in batches:
            left = left or len(self._loader)  # of the first batch
            left -= 1
            if left == 0:
                next(batches, None)  # The next epoch begins. Lightning never asks for a batch after the last one.
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position of all ranks together."""
        return self._position.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to a saved position."""
        self._position.load_state_dict(state_dict)
        vars(self)["_goes_on"] = True
        if len(self._trainer.fit_loop._combined_loader.flattened) > 1:
            return  # the Trainer counts the batches of all loaders together
        # Batches of another number of ranks have another size, so another number of them lies before the position.
        before = len(self) - (len(self._loader) if self._position.seen else 0)
        done = self._trainer.fit_loop.epoch_loop.batch_progress.current
        if done.ready:
            done.increment_by(before - done.ready)


def counted(loader: Any, trainer: Any) -> Any:
    """Return this loader, counted if it trains with a `ResumableBatchSampler`."""
    if isinstance(loader, CountedLoader):  # Lightning puts them into a CombinedLoader of the program
        loader = loader._loader
    has_position = isinstance(getattr(loader, "batch_sampler", None), ResumableBatchSampler)
    return CountedLoader(loader, trainer) if has_position and trainer.training else loader
