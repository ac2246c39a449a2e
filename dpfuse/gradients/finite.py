"""How many values of the gradients that this rank sends are NaN or infinite. Knows no bucket and no order of events."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dpfuse.engine import messages
from dpfuse.engine.streams import capturing
from dpfuse.errors import DPFuseError
from dpfuse_kernels.flatten import all_finite

__all__ = ["FiniteCheck", "FiniteCounter"]


class _Counts(NamedTuple):
    """What one bucket has counted in one backward."""

    step: int
    names: Sequence[str]
    values: Tensor  # [names] integers, on the CPU, which holds them once `ready` has passed
    ready: torch.cuda.Event | None


class FiniteCheck:
    """Gathers the counts of all buckets, and tells of them once per backward.

    On the CPU that is the backward in which they were counted. From a GPU they are copied without waiting, and told
    of at the end of the next backward.

    Args:
        raises: True raises where some value is not finite, False warns.
        late: whether counts are on a GPU, for which nobody waits.
        rank: of this process.
        step: the number of the synchronised backward that is running.
    """

    def __init__(self, *, raises: bool, late: bool, rank: int, step: Callable[[], int]) -> None:
        self.raises = raises
        self.late = late
        self._rank = rank
        self._step = step
        self._counts: list[_Counts] = []

    def begin(self) -> None:
        """A backward begins to send: what one before has left that was interrupted counts no more."""
        step = self._step()
        self._counts = [counts for counts in self._counts if counts.step != step]

    def add(self, names: Sequence[str], values: Tensor) -> None:
        """Take the counts of some parameters, [names]; on a GPU they may be overwritten behind this call."""
        if not self.late:
            if values.any():
                self._counts.append(_Counts(self._step(), names, values.clone(), None))
        elif not capturing():  # else they cannot be read, nor at a replay
            self._counts.append(_Counts(self._step(), names, *_copied(values)))

    def text(self, now: int) -> str | None:
        """What is known in backward `now`, in words, each count once; None if all was finite."""
        if not self._counts or capturing():
            return None
        known = [counts for counts in self._counts if not self.late or counts.step < now]
        self._counts = [counts for counts in self._counts if self.late and counts.step >= now]
        found: dict[int, dict[str, int]] = {}
        for counts in known:
            if counts.ready is not None:
                counts.ready.synchronize()  # it passed before this backward began, or the device is a step behind
            for name, value in zip(counts.names, counts.values.tolist(), strict=True):
                if value:
                    found.setdefault(counts.step, {})[name] = value
        return "; ".join(messages.nonfinite(step, names) for step, names in found.items()) or None

    def fail(self) -> None:
        """Before the last bucket is sent: raises DPFuseError if something is not finite and that is to be an error."""
        if self.raises and (text := self.text(self._step())):
            raise DPFuseError(text)

    def warn(self) -> None:
        """After the backward: warn if something is not finite and that is to be a warning."""
        if not self.raises and (text := self.text(self._step() - 1)):
            warnings.warn(f"rank {self._rank}: {text}", stacklevel=2)


class FiniteCounter:
    """Counts for one bucket.

    Args:
        check: what gathers them.
        is_first: whether the bucket is the first that a backward sends.
    """

    def __init__(self, check: FiniteCheck, *, is_first: bool) -> None:
        self._check = check
        self._is_first = is_first
        self._table: Tensor | None = None
        self._loose: list[tuple[str, Tensor]] = []

    def begin(self) -> None:
        """The bucket begins to be packed."""
        self._loose = []
        if self._is_first:
            self._check.begin()

    def begin_table(self, slots: int, device: torch.device) -> Tensor:
        """As `begin`; where to add the counts of that many slots, [slots] int32."""
        self.begin()
        if self._table is None or self._table.numel() != slots:
            self._table = torch.zeros(slots, dtype=torch.int32, device=device)
        return self._table

    def count(self, name: str, values: Tensor) -> None:
        """Count in what is not packed."""
        if self._check.late or not all_finite(values):
            self._loose.append((name, values.numel() - values.isfinite().count_nonzero()))

    def settle(self, names: Sequence[str]) -> None:
        """All of the bucket is counted; `names` are those of the first slots of the table."""
        if self._table is not None:
            self._check.add(names, self._table[: len(names)])
            self._table.zero_()
        if self._loose:
            self._check.add([name for name, _ in self._loose], torch.stack([count for _, count in self._loose]))

    def fail(self) -> None:
        """As that of the check, for the bucket that tells the peers."""
        self._check.fail()


def _copied(values: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """A copy in pinned memory, begun on the current stream, and the event behind it."""
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
    return copy, torch.cuda.current_stream().record_event()
