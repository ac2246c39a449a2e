"""What has happened on a rank in one backward, and what a report says of all ranks. Knows no tensor of the report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dpfuse.engine.report_layout import Question

__all__ = ["ALL_WELL", "Outcome", "Reading", "Row"]


@dataclass(slots=True)
class Outcome:
    """What has happened on this rank in the running backward."""

    missing: tuple[int, ...] = ()  # parameters without a gradient, of the buckets sent so far
    frozen: frozenset[int] = frozenset()  # parameters that were frozen since they were planned
    just_frozen: frozenset[int] = frozenset()  # those of them that an open window may have accumulated before
    late: tuple[int, ...] = ()  # parameters that became ready after their bucket was sent
    error: Exception | None = None  # the first error of this rank
    failed: bool = False  # whether an exception ended it
    out_of_memory: bool = False  # whether that was torch's error of memory
    changed: bool = False  # whether the model has changed since the buckets were made
    torn: bool = False  # whether a collective, or a user's hook in its place, has raised
    well: bool = True  # whether the gradients of this rank are right: no error, no end, no late gradient was noted

    def note(self, error: Exception) -> None:
        """Note an error of this rank; the first one stays."""
        self.error, self.well = self.error or error, False

    def note_late(self, indices: Iterable[int]) -> None:
        """Note parameters that became ready after their bucket was sent."""
        self.late += tuple(indices)
        self.well = self.well and not self.late

    def note_end(self) -> None:
        """Note that an exception has ended the backward."""
        self.failed, self.well = True, False

    @property
    def memory_ran_out(self) -> bool:
        """Whether the gradients of this rank are wrong because its memory ran out."""
        return (self.failed and self.out_of_memory) or isinstance(self.error, torch.OutOfMemoryError)


class Row(NamedTuple):
    """What one rank has told.

    Attributes:
        failed, changed: whether it failed, and whether its model has changed.
        is_compared: whether its numbers are compared: not without inputs, or after a forward that raised.
        frozen: how many parameters it has frozen.
        numbers: of each field, and a hash of the set of frozen parameters.
    """

    failed: bool
    changed: bool
    is_compared: bool
    frozen: int
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Reading:
    """What a report says, summed over the ranks.

    Attributes:
        any_failed: whether a rank failed.
        any_changed, any_unchanged: whether a rank has another model than the buckets are for, or the same.
        out_of_memory: whether a rank failed because its memory ran out.
        asked: the questions that a rank asks.
        told: names of the places in which the bits of ranks differ, which is no failure.
        differing: names of the fields in which ranks differ. Without rows it is only known that some field differs
            where the bits that travel of each are equal: it is none of the names of fields then.
        rank: the one rank that failed or has changed; None if there is none, or several, or if it is unknown.
        rows: of each rank. Empty where they were not gathered.
    """

    any_failed: bool = False
    any_changed: bool = False
    any_unchanged: bool = True
    out_of_memory: bool = False
    differing: tuple[str, ...] = ()
    rank: int | None = None
    rows: tuple[Row, ...] = ()
    asked: tuple[Question, ...] = ()
    told: tuple[str, ...] = ()

    @property
    def all_well(self) -> bool:
        """Whether the gradients of all ranks are right."""
        return not (self.any_failed or self.any_changed or self.differing)

    def failed(self) -> list[int]:
        """Return the ranks that failed, as far as they are known."""
        if self.rows:
            return [rank for rank, row in enumerate(self.rows) if row.failed]
        return [] if self.rank is None or not self.any_failed else [self.rank]

    def changed(self) -> list[int]:
        """Return the ranks whose model has changed, as far as they are known."""
        if self.rows:
            return [rank for rank, row in enumerate(self.rows) if row.changed]
        return [] if self.rank is None or not self.any_changed else [self.rank]


ALL_WELL = Reading()
