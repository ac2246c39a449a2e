"""How many values of the gradients that this rank sends are NaN or infinite, and what is done about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dpfuse.engine import messages
from dpfuse.engine.comm_buffer import CommBuffer
from dpfuse.engine.feature import Engine, Feature
from dpfuse.engine.plan import Bucket
from dpfuse.engine.protocols import PackArguments, PackStep
from dpfuse.engine.report import Report
from dpfuse.engine.streams import HostCopy, capturing
from dpfuse.engine.user_line import warn_at_user
from dpfuse.errors import DPFuseError
from dpfuse_kernels.flatten import all_finite

__all__ = ["FiniteCheck"]


class _Counts(NamedTuple):
    """What one bucket has counted in one backward."""

    step: int
    names: Sequence[str]
    values: HostCopy  # [names] integers


class FiniteCheck(Feature):
    """Gathers the counts of all buckets, and tells of them once per backward.

    On the CPU that is the backward in which they were counted. From a GPU they are copied without waiting, and told
    of at the end of the next backward.

    Args:
        raises: True raises where some value is not finite, False warns.
        late: whether counts are on a GPU, for which the host does not wait.
    """

    _engine: Engine

    def __init__(self, *, raises: bool, late: bool) -> None:
        self.raises = raises
        self.late = late
        self._counts: list[_Counts] = []

    eager = False

    def step(self, order: int, bucket: Bucket, buffer: CommBuffer, report: Report | None) -> PackStep | None:
        return _FiniteStep(self, buffer.names, is_last=report is not None)

    def join(self, engine: Engine) -> None:
        """As `Feature.join`."""
        self._engine = engine

    def _step(self) -> int:
        """Return the number of the synchronised backward that is running."""
        return self._engine.completed + 1

    def backward_begins(self, *, sync: bool, announced: bool) -> None:
        """As `Watcher.backward_begins`: forget what a backward that was interrupted has counted."""
        if sync:
            step = self._step()
            self._counts = [counts for counts in self._counts if counts.step != step]

    def delivered(self) -> None:
        """As `Watcher.delivered`: warn if something is not finite and that is to be a warning."""
        if self.raises:
            return
        try:
            text = self.text(self._step() - 1)
        except Exception as error:  # the gradients are averaged, and no other rank raises in this backward
            text = f"the check of the gradients for NaN and infinite values failed: {error!r}"
        if text:
            warn_at_user(f"rank {self._engine.group.rank()}: {text}")

    def add(self, names: Sequence[str], values: Tensor) -> None:
        """Store the counts of some parameters, [names]. On a GPU the tensor may be overwritten after this call."""
        if not self.late:
            if values.any():
                self._counts.append(_Counts(self._step(), names, HostCopy(values)))
        elif not capturing():  # else they cannot be read, nor at a replay
            self._counts.append(_Counts(self._step(), names, HostCopy(values)))

    def text(self, now: int) -> str | None:
        """What is known in backward `now`, in words, each count once; None if all was finite."""
        if not self._counts or capturing():
            return None
        known = [counts for counts in self._counts if not self.late or counts.step < now]
        self._counts = [counts for counts in self._counts if self.late and counts.step >= now]
        found: dict[int, dict[str, int]] = {}
        for counts in known:
            # They arrived before this backward began, or the device is a step behind.
            for name, value in zip(counts.names, counts.values.read(), strict=True):
                if value:
                    found.setdefault(counts.step, {})[name] = value
        return "; ".join(messages.nonfinite(step, names) for step, names in found.items()) or None

    def fail(self) -> None:
        """Before the last bucket is sent: raises DPFuseError if something is not finite and that is to be an error."""
        if self.raises and (text := self.text(self._step())):
            raise DPFuseError(text)


class _FiniteStep(PackStep):
    """Counts for one bucket. The last one has the report, which tells the peers."""

    def __init__(self, check: FiniteCheck, names: Sequence[str], *, is_last: bool) -> None:
        self._check = check
        self._names = names
        self._is_last = is_last
        self._table: Tensor | None = None
        self._outside: list[tuple[str, Tensor]] = []

    def before(self, arguments: PackArguments) -> None:
        self._outside = []
        slots = len(arguments.table.slots)
        if not self._names:
            return
        if self._table is None or self._table.numel() != slots:
            self._table = torch.zeros(slots, dtype=torch.int32, device=arguments.table.flat.device)
        arguments.counts = self._table

    def outside(self, names: Sequence[str], tensors: list[Tensor]) -> None:
        for name, values in zip(names, tensors, strict=True):
            if self._check.late or not all_finite(values):
                self._outside.append((name, values.numel() - values.isfinite().count_nonzero()))

    def after(self, arguments: PackArguments) -> None:
        if self._table is not None:
            self._check.add(self._names, self._table[: len(self._names)])
            self._table.zero_()
        if self._outside:
            self._check.add([name for name, _ in self._outside], torch.stack([count for _, count in self._outside]))
        if self._is_last:
            self._check.fail()
