"""Short words that the ranks add up beside the gradients, in a few backwards: they tell whether all ranks do the same.

Each word is some bits. A sum of bits that is neither 0 nor the number of ranks shows a difference. Every rank reads the
same sums, so all ranks find the same. A sum does not say which rank differs, and a difference fails no backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dpfuse.engine.report import Report
from dpfuse.engine.report_layout import ReportPlace
from dpfuse.engine.streams import HostCopy, capturing

__all__ = ["FIRST", "LAST", "WIDTHS", "ComparedWords", "Sums", "Word", "bits_of", "is_due", "next_change"]

Word = Sequence[float] | Tensor
WIDTHS = {
    "there": 1,  # the rank takes part
    "hashed": 1,  # its inputs have a hash
    "inputs": 8,  # that hash
    "parallel": 1,  # the mean before had the direction of this rank's own gradient
    "training": 1,  # the training flag of the module
    "float16": 1,  # the dtype of autocast
    "bfloat16": 1,
    "rated": 1,  # all learning rates are numbers of the host
    "owned": 8,  # a hash of which parameters its optimizers step on
    "rates": 8,  # a hash of their learning rates
    "rate": 1,  # the mean of these, a number
}
FIRST, LAST = 3, 20  # synchronised backwards, counted from 0, in which words are sent
EVERY, RUNNING = 128, 2  # later: two backwards out of so many


def is_due(averages: int) -> bool:
    """Whether words travel with the synchronised backward that follows `averages` others. The same on all ranks.

    Example:
        >>> [number for number in range(300) if is_due(number)]
        [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 128, 129, 256, 257]
    """
    return FIRST <= averages < LAST or (averages >= EVERY and averages % EVERY < RUNNING)


def next_change(averages: int) -> int:
    """Return the next number of averages for which `is_due` is other than for this one.

    Example:
        >>> next_change(0), next_change(3), next_change(127), next_change(128)
        (3, 20, 128, 130)
    """
    for edge in (FIRST, LAST, EVERY):
        if averages < edge:
            return edge
    place = averages % EVERY
    return averages - place + (RUNNING if place < RUNNING else EVERY)


class Sums:
    """What the ranks have added up.

    Args:
        place: of the words in the report.
        numbers: the sums over the ranks, of all words.
        own: the words of this rank.
        size: number of ranks.
    """

    def __init__(self, place: ReportPlace, numbers: Sequence[float], own: Sequence[float], size: int) -> None:
        self._parts = place.parts
        self._numbers = numbers
        self._own = own
        self.size = size

    def total(self, name: str) -> float:
        """Return the sum of a word of one number."""
        return float(self._numbers[self._parts[name].start])

    def bit(self, name: str) -> tuple[int, bool]:
        """Return how many ranks have set this bit, and whether this one has."""
        place = self._parts[name].start
        return round(self._numbers[place]), bool(self._own[place])

    def own(self, name: str) -> list[float]:
        """Return the word of this rank."""
        return list(self._own[self._parts[name]])

    def all_set(self, name: str) -> bool:
        """Whether all ranks have set this bit."""
        total: float = self._numbers[self._parts[name].start]
        return round(total) == self.size

    def same(self, name: str) -> bool:
        """Whether all ranks have sent the same bits."""
        return {*map(round, self._numbers[self._parts[name]])} <= {0, self.size}


class ComparedWords:
    """Writes the words of this rank into the report, and reads the sums: on a GPU one backward later.

    Args:
        place: of the words in the report.
        size: number of ranks.
    """

    def __init__(self, place: ReportPlace, size: int) -> None:
        self._place = place
        self._size = size
        self._own: list[float] = []
        self._on_gpu: Tensor | None = None  # the hash of the inputs, where only the device knows it
        self._report: Report | None = None  # into which they were written
        self._copy: tuple[HostCopy, list[float]] | None = None  # of the sums, and the words of this rank

    def tell(self, report: Report, packed: Tensor, words: Mapping[str, Word]) -> None:
        """Write words into what is packed, [numel]; those that are left out are zeros."""
        if capturing():
            return
        own, self._on_gpu = [0.0] * self._place.width, None
        for name, word in words.items():
            if isinstance(word, Tensor):
                self._on_gpu = word
            else:
                own[self._place.parts[name]] = word
        self._own, self._report = own, report
        report.write(packed, self._place, torch.tensor(own, dtype=torch.float64, device="cpu"))
        if self._on_gpu is not None:
            report.write(packed, self._place, self._on_gpu, "inputs")

    @property
    def waits(self) -> bool:
        """Whether sums are on their way."""
        return self._copy is not None or self._report is not None

    def delivered(self) -> Sums | None:
        """Return sums that have become known, if there are any. To be called after each synchronised backward."""
        if self._copy is not None and capturing():
            return None  # the host must not wait for the copy during a capture: a later backward reads it
        known = None if self._copy is None else self._read(*self._copy)
        self._copy = None
        report, self._report = self._report, None
        if report is None:
            return known
        sums = report.sums(self._place)
        if not sums.is_cuda:
            return Sums(self._place, sums.tolist(), self._own, self._size)
        sums = sums if self._on_gpu is None else torch.cat([sums, self._on_gpu.to(sums.dtype)])
        self._copy = HostCopy(sums), self._own
        return known

    def _read(self, copy: HostCopy, own: list[float]) -> Sums:
        numbers, width = copy.read(), self._place.width
        if len(numbers) > width:
            own[self._place.parts["inputs"]] = numbers[width:]
        return Sums(self._place, numbers[:width], own, self._size)


def bits_of(number: int, count: int) -> list[float]:
    """Return the lowest bits of a number, as floats.

    Example:
        >>> bits_of(6, 4)
        [0.0, 1.0, 1.0, 0.0]
    """
    return [float(number >> place & 1) for place in range(count)]
