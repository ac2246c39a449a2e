"""On CUDA the host reads a report one backward later, so that it waits for nothing. Knows no field and no rank."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from dpfuse.engine.reading import ALL_WELL, Reading
from dpfuse.engine.report_format import ReportFormat
from dpfuse.engine.streams import HostCopy

__all__ = ["Guard", "HostPairs", "LateReading", "PairsReader"]

Guard = Callable[[Tensor, "tuple[Tensor, Tensor] | None"], None]


class HostPairs:
    """The pairs of a report in the host's memory, whose bytes can be compared in less time than one operation takes.

    Args:
        values: where they lie or arrive, [elements], on the CPU.

    Attributes:
        values: as given.
        memory: their bytes.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.memory = (ctypes.c_char * (values.numel() * values.element_size())).from_address(values.data_ptr())


class PairsReader:
    """Knows what the pairs of a report say.

    Args:
        format: of the report.

    Attributes:
        usual: the bytes of those that said last that all is well.
    """

    def __init__(self, format: ReportFormat) -> None:
        self.usual = b""
        self._format = format

    def read(self, host: HostPairs) -> Reading:
        """Return what these say: in nearly every backward that all is well, nothing differs and no rank asks."""
        memory = host.memory.raw
        if memory == self.usual:
            return ALL_WELL
        told = host.values.tolist()
        if self._format.says_something(told):
            return self._format.read(told)
        self.usual = memory  # the ranks compare other numbers now, and have the same ones
        return ALL_WELL


class LateReading:
    """What the ranks report in one backward, until the host reads it in the next one.

    A backward keeps its pairs, and hands them over once its gradients are delivered: a kernel that acts on them may
    copy them in the same launch.

    Args:
        reading_of: returns what pairs in the host's memory say.

    Attributes:
        is_pending: whether pairs are kept that were not read.
        early: what this rank has read of the last backward at once; the others hear it in the next one.
    """

    def __init__(self, reading_of: Callable[[HostPairs], Reading]) -> None:
        self.is_pending = False
        self.early = ALL_WELL
        self._reading_of = reading_of
        self._copy: HostCopy | None = None
        self._host: HostPairs | None = None  # of that copy
        self._uncopied: tuple[Tensor, Tensor] | None = None  # of the last backward: from the device, to the host
        self._before: LateReading | None = None  # of the report before, while that has something to tell

    def follow(self, before: LateReading) -> None:
        """Tell in the next backward what another report has not told so far, since this one replaces it."""
        self._before = before

    def hear(self) -> tuple[Reading, Reading]:
        """Return what the ranks reported in the backward before if that was not read then, and what all have heard."""
        unread = self._unread()
        early, self.early = self.early, ALL_WELL
        if early is ALL_WELL:
            return unread, unread
        asked = dict.fromkeys((*unread.asked, *early.asked))
        return unread, replace(unread, asked=tuple(asked), told=(*unread.told, *early.told))

    def _unread(self) -> Reading:
        before, self._before = self._before, None
        if before is not None:
            return before.hear()[1]
        if not self.is_pending:
            return ALL_WELL
        assert self._copy is not None
        assert self._host is not None
        self.is_pending = False
        self.hand_over()  # an interrupt may have struck before it
        self._copy.wait()
        return self._reading_of(self._host)

    def keep(self, told: Tensor) -> None:
        """Keep the pairs of this backward, [elements] on the device, for the next one."""
        if self._copy is None:
            self._copy = HostCopy(told)
            self._host = HostPairs(self._copy.arriving)
        else:
            self._uncopied = told, self._copy.arriving
        self.is_pending = True

    def hand_over(self, guard: Guard | None = None, pairs: Tensor | None = None) -> None:
        """Copy what was kept to the host, and let the device act on it in the same launch.

        Args:
            guard: gets the summed pairs, and what it is to copy: from and to; None if that is nothing.
            pairs: the summed pairs of the fields, [2 * pairs], for the guard.
        """
        uncopied, copy = self._uncopied, self._copy
        if guard is not None and pairs is not None:
            guard(pairs, uncopied)
        if uncopied is not None and copy is not None:
            if guard is None:
                copy.take(uncopied[0])
            else:
                copy.written()
            self._uncopied = None
