"""The rule of DPF-L03: a window of batches, shorter than all before it, is lost or is not averaged."""

from __future__ import annotations

from torch.optim import Optimizer

from dpfuse.findings import CUT_WINDOW, findings
from dpfuse.loop.watched_gradient import WatchedGradient

__all__ = ["CutWindows"]

WINDOWS = 8  # of the same length, which show how long a window is meant to be
DROPS = 2  # of the same length, as far from each other as from the beginning: an epoch; others are skipped on purpose


class CutWindows:
    """Compares the lengths of windows: how many backwards have written a gradient before a step.

    A program may do so on purpose, and no comparison of ranks tells. So the finding goes to a log.

    Args:
        watched: a gradient of the optimizer.
    """

    def __init__(self, watched: WatchedGradient) -> None:
        self._watched = watched
        self._length = 0  # of the last window that ended with an average
        self._same = 0  # such windows in a row that had this length
        self._compares = False  # whether the bits of local gradients are copied
        self._between = 0  # such windows since the last drop
        self._drops = 0  # windows of one length that were zeroed, equally far from each other
        self._dropped = (0, 0)  # that length, and how many windows there were before each

    def before_step(self, optimizer: Optimizer) -> None:
        """Compare the window that ends with this step, and those that were zeroed since the last one."""
        watched = self._watched
        if watched.dropped:
            self._look_at_drops(optimizer)
        if watched.means and not watched.rest:
            self._between += 1
            if watched.length == self._length:
                self._same += 1
            else:
                self._length, self._same = watched.length, 1
            if self._same == WINDOWS and self._length > 1 and not watched.param.is_cuda:
                self._compare_bits()
        elif watched.locals == watched.length < self._usual():
            self._look_at_step(optimizer)

    @property
    def settled(self) -> bool:
        """Whether another window that ends with an average, and has this length, changes nothing but numbers."""
        return self._length == 1 or self._same >= WINDOWS

    def skipped(self, count: int) -> None:
        """Note so many of these windows, of which it was not told."""
        self._between += count
        self._same += count

    def _compare_bits(self) -> None:
        """Let the bits of gradients be copied from now on. On a GPU that takes a kernel each time."""
        if not self._compares:
            self._compares = True
            self._watched.keeps_bits += 1

    def _look_at_step(self, optimizer: Optimizer) -> None:
        watched = self._watched
        if watched.bits is None:
            self._compare_bits()  # the next time will tell whether the program averages by itself
        elif not watched.was_kept:
            self._same = 0  # it does
        else:
            findings.note(
                CUT_WINDOW,
                watched.rank,
                f"rank {watched.rank}: the last {WINDOWS} windows of {type(optimizer).__name__} that were averaged had "
                f"{self._usual()} backwards each. This one has {watched.length}, and none of them was synchronised, so "
                "this step uses gradients of this rank alone. Expected the last batch before each step to be "
                "synchronised, also that of an epoch: "
                "`model.no_sync(enabled=not (last_of_window or last_of_epoch))`.",
            )

    def _usual(self) -> int:
        """Return the length of the last windows, if they had the same; else 0."""
        return self._length if self._same >= WINDOWS else 0

    def _look_at_drops(self, optimizer: Optimizer) -> None:
        watched, usual = self._watched, self._usual()
        length = watched.dropped[0]
        # A program that drops a window between any two steps does so on purpose: its gradients are for another use.
        if len(watched.dropped) > 1 or length >= usual or self._between < WINDOWS // 2:
            self._drops = 0
        elif (length, self._between) == self._dropped:
            self._drops += 1
        else:
            self._drops, self._dropped = 1, (length, self._between)
        self._between = 0
        if self._drops >= DROPS:
            findings.note(
                CUT_WINDOW,
                watched.rank,
                f"rank {watched.rank}: the last {WINDOWS} windows of {type(optimizer).__name__} had {usual} backwards "
                f"each. {self._drops} windows, of {length} each, were zeroed without a step, so their "
                "batches taught nothing. Expected a step for each window: step at the end of an epoch, too, behind a "
                "synchronised backward, or let an epoch have a whole number of windows.",
            )
