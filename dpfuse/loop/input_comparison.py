"""Hears what ranks tell each other of their inputs, for the rule of DPF-L05."""

from __future__ import annotations

from weakref import WeakSet

from dpfuse.findings import findings
from dpfuse.loop.compared_words import Sums
from dpfuse.loop.training_record import TrainingRecord
from dpfuse.rules.codes import SAME_BATCHES
from dpfuse.rules.l05_same_batches import STEPS, Batch, Batches, note, text_of

__all__ = ["InputComparison"]


class InputComparison:
    """Compares the hashes of the inputs, until the ranks have shown different ones.

    A generator of images may get the same noise on every rank, while the real images differ. So nothing is said where
    another wrapper of this process has seen different inputs, or has not seen enough.

    Args:
        record: of the model whose gradients are averaged.

    Attributes:
        decided: whether nothing is to be compared any more.
    """

    def __init__(self, record: TrainingRecord) -> None:
        self.decided = False
        self._record = record
        self._seen = Batches()
        _all.add(self)

    def begin_again(self) -> None:
        """Compare from now on what was decided before, since a rank suspects that batches have become equal."""
        self.decided = False
        self._seen = Batches()

    @property
    def nearly_told(self) -> bool:
        """Whether gradients are to be compared: one backward copies them, the next tells, and a GPU is one late."""
        return self._seen.row >= STEPS - 3

    def heard(self, sums: Sums) -> None:
        """Take what the ranks have sent."""
        own = (*sums.own("inputs"),) if sums.all_set("hashed") else None
        self._seen = note(self._seen, Batch(own, sums.same("inputs"), sums.all_set("parallel")))
        self.decided = self.decided or self._seen.differ

    def tell(self) -> None:
        """Say what was found."""
        if self._seen.row < STEPS or self.decided or any(not other._may_be_wrong for other in tuple(_all)):
            return
        self.decided = True
        text = text_of(self._record.rank, self._seen)
        if self._seen.parallel:
            findings.tell(SAME_BATCHES, text, self._record.level)
        else:
            findings.note(SAME_BATCHES, self._record.rank, text)

    @property
    def _may_be_wrong(self) -> bool:
        return self._seen.row >= STEPS and not self._seen.differ


_all: WeakSet[InputComparison] = WeakSet()  # of this process
