"""The rule of DPF-L05: all ranks compute on the same batches."""

from __future__ import annotations

from weakref import WeakSet

from dpfuse.findings import SAME_BATCHES, findings
from dpfuse.loop.compared_words import Sums
from dpfuse.loop.record import Record

__all__ = ["SameBatches"]

STEPS = 8  # in a row, in which the hashes of all ranks were equal, and other ones than in the step before


class SameBatches:
    """Compares the hashes of the inputs, until the ranks have shown different ones.

    A generator of images may get the same noise on every rank, while the real images differ. So nothing is said where
    another wrapper of this process has seen different inputs, or has not seen enough.

    Equal inputs alone prove nothing: each rank may take its part of the batch in forward, or have other targets, or
    noise of its own. So they are a mistake only where all ranks have the same gradient, too.

    Args:
        record: of the model whose gradients are averaged.

    Attributes:
        decided: whether nothing is to be compared any more.
    """

    def __init__(self, record: Record) -> None:
        self.decided = False
        self._differ = self._parallel = False
        self._record = record
        self._before: list[float] = []
        self._steps = 0
        _all.add(self)

    def begin_again(self) -> None:
        """Compare from now on what was decided before, since a rank suspects that batches have become equal."""
        self.decided = self._differ = False
        self._steps, self._before = 0, []

    @property
    def nearly_told(self) -> bool:
        """Whether gradients are to be compared: one backward copies them, the next tells, and a GPU is one late."""
        return self._steps >= STEPS - 3

    def heard(self, sums: Sums) -> None:
        """Take what the ranks have sent."""
        if not sums.all_set("hashed"):
            self._steps = 0
            return
        self._parallel = sums.all_set("parallel") or (self._parallel and self._steps > 0)
        own = sums.own("inputs")
        if not sums.same("inputs"):
            self.decided = self._differ = True
        self._steps = 0 if own == self._before else self._steps + 1
        self._before = own

    def tell(self) -> None:
        """Say what was found."""
        if self._steps < STEPS or self.decided:
            return
        if any(other._differ or other._steps < STEPS for other in tuple(_all)):
            return
        self.decided = True
        rank = self._record.rank
        seen = (
            f"rank {rank}: in {self._steps} steps in a row, hashes of all inputs of the model were equal on all ranks, "
            "and other ones than in the step before."
        )
        do = "give the loader a DistributedSampler, or let the rank be part of the seed with which samples are drawn"
        if self._parallel:
            findings.tell(
                SAME_BATCHES,
                f"{seen} Every rank computes on the same batches, so more ranks do not mean more data. Expected other "
                f"batches on each rank: {do}. If equal inputs are meant, pass "
                'check_training="log" to the wrapper.',
                self._record.level,
            )
            return
        findings.note(
            SAME_BATCHES,
            rank,
            f"{seen} The gradients of the ranks differ, as where each rank takes its part of the batch in forward, or "
            f"has other targets. If the batches are equal by mistake, and only dropout differs, {do}.",
        )


_all: WeakSet[SameBatches] = WeakSet()  # of this process
