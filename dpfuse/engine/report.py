"""What the ranks tell each other with the last bucket: which rank failed, what differs, which parameters were used.

The report is summed with the gradients, so it costs no collective of its own. Its size does not depend on the number
of ranks, apart from one element per parameter. It is in no plan and counts in no plan's bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, methodcaller, mul
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.comm import collective
from dpfuse.engine.late_reading import Guard, HostPairs, LateReading, PairsReader
from dpfuse.engine.reading import ALL_WELL, Outcome, Reading, Row
from dpfuse.engine.report_format import CHANGED, FAILED, NO_MEMORY, RANK_BITS, ReportFormat, bits_of
from dpfuse.engine.report_layout import Question, ReportLayout, ReportPlace
from dpfuse.engine.streams import capturing
from dpfuse.engine.sync_decision import Window
from dpfuse_kernels.spoil import any_pair

__all__ = ["Compared", "Report"]

_asks = attrgetter("asks")
_number_of = methodcaller("value")


class Compared:
    """Bits of a feature, which the ranks compare in each backward.

    Args:
        pairs: where the feature writes them, [bits, 2]: each bit b as b and 1 - b. Zeros say nothing.
        late: whether ranks hear of a backward in the next one.

    Attributes:
        late: as given.
        differs: whether the ranks' bits differed in the backward of which every rank has heard by now: on a CPU this
            backward, on CUDA the one before.
    """

    def __init__(self, pairs: Tensor, *, late: bool) -> None:
        self.pairs = pairs
        self.late = late
        self.differs = False


class Report:
    """The report of one rank, and what the ranks' reports come to; `ReportFormat` says where each number lies.

    A feature may have bits compared that only the device knows. A difference in them is no failure: the feature decides
    what follows.

    Args:
        group: the ranks.
        param_count: number of parameters of the plan.
        layout: what it holds besides; what is registered later is not in this report.
        window: knows whether this rank has inputs.
        dtype: the dtype in which it is packed: float32, float64, or that of gradients that travel as one of these.
        device: the device on which it is packed.

    Attributes:
        numel: the number of its elements.
        is_on_cpu: whether it lies on the CPU, where every rank reads it as soon as it has landed.
        asked: the questions that a rank has asked, and of which every rank has heard by now: on a CPU in this backward,
            on CUDA in the one before.
        captured: whether a CUDA graph has captured the last backward, so that its replays tell the host nothing.
        writers: as those of the layout.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        param_count: int,
        layout: ReportLayout,
        window: Window,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.group = group
        self._is_alone = group.size() == 1
        self.writers = layout.writers
        self._window = window
        self.asked: tuple[Question, ...] = ()
        self.captured = False
        self._format = format = ReportFormat(layout, param_count)
        self.numel = format.numel
        # What `_source` tells.
        self._values: list[object] = [*[0] * len(format.fields), *[False] * len(format.questions), True, frozenset()]
        self._source = torch.tensor(format.elements(self._values), dtype=dtype, device=device)  # of a rank that is well
        self.is_on_cpu = self._source.is_cpu
        self._bits = {
            place: Compared(self._source[slice(*format.ends(place))].view(-1, 2), late=not self.is_on_cpu)
            for place in format.compared
        }
        self._sums: _Sums | None = None  # of this backward
        self._latest: _Sums | None = None  # of this one, or the one before
        self._host: HostPairs | None = None  # on a CPU, of this backward
        self._pairs = PairsReader(format)
        # On CUDA. It leads to no report, which has the memory of a buffer: a cycle would keep that for a while.
        self._late = LateReading(self._pairs.read)
        self._told = ALL_WELL  # what every rank has heard last

    def source(self, outcome: Outcome) -> Tensor:
        """Return what this rank packs, [numel]."""
        self._sums = None
        format = self._format
        values: list[object] = [*map(_number_of, format.fields), *map(_asks, format.questions)]
        values += not (self._window.without_inputs or self._window.excused), outcome.frozen
        usual = outcome.well and not (outcome.changed or outcome.missing)
        if values == self._values and usual:
            return self._source  # as in nearly every backward
        source = self._source
        # A graph packs the same memory at each replay, whatever the host counts then. So it keeps what was told last.
        if values != self._values and not capturing():
            self._tell(values)
        if usual:
            return source
        source = source.clone() if source is self._source else source
        for index in outcome.missing:
            _put(source, format.params + index, 0.0)
        if outcome.changed:
            _write_bits(source, CHANGED, 1, 1)
        if not outcome.well:
            self.write_failure(source, out_of_memory=outcome.memory_ran_out)
        if outcome.changed:
            _write_bits(source, format.rank, self.group.rank(), RANK_BITS)
        return source

    def _tell(self, values: list[object]) -> None:
        pairs = torch.tensor(self._format.pairs(values), dtype=self._source.dtype, device="cpu")
        late = self._source.is_cuda
        pairs = pairs.pin_memory() if late else pairs
        self._source[: pairs.numel()].copy_(pairs, non_blocking=late)  # one operation, for which the host does not wait
        self._values = values

    def write_failure(self, packed: Tensor, *, out_of_memory: bool = False) -> None:
        """Write into what is packed, [numel], that this rank has failed."""
        _write_bits(packed, FAILED, 1, 1)
        if out_of_memory:
            _put(packed, 2 * NO_MEMORY, 1.0)  # no rank sends the other number of this pair
        _write_bits(packed, self._format.rank, self.group.rank(), RANK_BITS)

    def compared(self, place: ReportPlace) -> Compared:
        """Return the bits of a place that is compared."""
        return self._bits[place]

    def differ_now(self, place: ReportPlace) -> bool:
        """Whether the ranks' bits of a place differ in this backward, which has landed; on a CPU."""
        if self._sums is None:  # it is that of a changed model, and the old one's has landed
            return False
        numbers = self._sums.view[slice(*self._format.ends(place))].tolist()
        return any(map(mul, numbers[::2], numbers[1::2]))

    def write(self, packed: Tensor, place: ReportPlace, values: Tensor, part: str = "") -> None:
        """Write numbers of a place, or of a part of it, into what is packed, unscaled. Nothing waits.

        Args:
            packed: the report, as it is packed, [numel].
            place: where numbers are added up.
            values: [width], or [] for one, on its device or on the CPU.
            part: the name of the part; empty for all of it.
        """
        late = packed.is_cuda and not values.is_cuda
        values = values.to(packed.dtype).pin_memory() if late else values
        start, end = self._format.ends(place)
        within = packed[start:end][place.parts[part]] if part else packed[start:end]
        within.copy_(values, non_blocking=late)

    def sums(self, place: ReportPlace) -> Tensor:
        """Return the sums of the numbers of a place over the ranks, [width], on the device, without waiting."""
        assert self._sums is not None
        return self._sums.view[slice(*self._format.ends(place))]

    def landed(self, view: Tensor) -> None:
        """Note where the summed report lies, [numel]; it stays valid until the bucket is packed again."""
        before = self._latest
        # It is usually where the one before was, and making a slice takes a microsecond.
        parts = None if before is None or before.view is not view else before.parts
        if parts is None:
            told = view[: self._format.told]
            parts = _Parts(told, told[: self._format.states])
        self._latest = self._sums = _Sums(view, parts)

    def used_somewhere(self, indices: Collection[int]) -> set[int]:
        """Return those of `indices` that some rank used. Waits for the device."""
        assert self._sums is not None
        flags = self._sums.view[self._format.params :].tolist()
        return {index for index in indices if flags[index]}

    @property
    def unreadable(self) -> bool:
        """Whether a CUDA graph is being captured, so that nothing on the device can be read."""
        return capturing()

    @property
    def was_read(self) -> bool:
        """Whether the host has read this backward's report. On CUDA it may read it one backward later, or never."""
        return self.is_on_cpu or not (self._late.is_pending or capturing())

    def read(self, outcome: Outcome, *, wait: bool, gather: bool) -> Reading:
        """Return what the ranks report.

        Args:
            outcome: of this rank.
            wait: read this backward's report even if that means waiting for the device. Otherwise a report on CUDA is
                copied without waiting, and the one of the backward before is read.
            gather: whether every rank reads this backward's report now, so that details can be gathered.
        """
        sums = self._sums
        assert sums is not None
        if sums.reading is not None:
            return sums.reading
        self.asked = ()
        self.captured = not self.is_on_cpu and capturing()
        if self.captured:
            self._tell_of(ALL_WELL)
            return ALL_WELL if outcome.well else Reading(any_failed=True, rank=self.group.rank())
        if self._is_alone and outcome.well and not outcome.changed:  # no other rank can report anything
            self.asked = tuple(filter(_asks, self._format.questions))
            return ALL_WELL
        if self.is_on_cpu:
            host = self._host
            if host is None or host.values is not sums.parts.told:
                host = self._host = HostPairs(sums.parts.told)
            reading = ALL_WELL if host.memory.raw == self._pairs.usual else self._pairs.read(host)
            if reading is not self._told:
                self._tell_of(reading)
            if reading is ALL_WELL:
                return reading
        else:
            late, told = self._late, sums.parts.told
            before, heard = late.hear()
            self._tell_of(heard)
            if not wait:
                late.keep(told)
                if before is not ALL_WELL:  # an error may follow, or an exchange that fails, in place of `hand_over`
                    late.hand_over()
                return before
            if not before.all_well and outcome.well:
                now = self._format.read(told.tolist()) if outcome.changed else None
                if now is not None and not now.any_unchanged:
                    late.early = now  # every rank has changed, so all wait, and no rank reads it in the next backward
                else:
                    late.keep(told)  # ranks that do not wait read it in the next backward, so this rank does, too
                    late.hand_over()
                return before
            reading = late.early = self._pairs.read(HostPairs(told.cpu()))
        if not reading.all_well and gather:
            sums.reading = self._with_rows(reading, outcome, sums)
            return sums.reading
        sums.reading = reading
        return reading

    def wrong(self) -> Tensor:
        """Return whether some rank reports a failure or a difference, as a bool, [], on the device, without waiting.

        It is called only if this rank itself has neither failed nor changed.
        """
        return any_pair(self.pairs())

    def pairs(self) -> Tensor:
        """Return the summed pairs, [2 * pairs], on the device: where ranks differ, both numbers of a pair are not 0."""
        assert self._sums is not None
        return self._sums.parts.states

    def _with_rows(self, reading: Reading, outcome: Outcome, sums: _Sums) -> Reading:
        """Return the reading with what each rank has told. Ranks gather once, also where an exception strikes then."""
        if sums.rows is None:
            own = [not outcome.well, outcome.changed, self._values[-2], len(outcome.frozen)]
            row = torch.tensor(
                [*own, *self._format.numbers(self._values)],
                dtype=torch.int64,
                device=collective.group_device(self.group),
            )
            sums.rows = collective.all_gather(row, self.group)
        gathered = [each.tolist() for each in sums.rows]
        rows = tuple(
            Row(bool(failed), bool(changed), bool(is_compared), frozen, tuple(numbers))
            for failed, changed, is_compared, frozen, *numbers in gathered
        )
        columns = zip(*(row.numbers for row in rows if row.is_compared), strict=True)
        differing = tuple(
            name for name, column in zip(self._format.names, columns, strict=False) if len(set(column)) > 1
        )
        return replace(reading, differing=differing, rows=rows)

    def _tell_of(self, reading: Reading) -> None:
        """Note what every rank has heard by now."""
        self._told, self.asked = reading, reading.asked
        for place, compared in self._bits.items():
            compared.differs = place.name in reading.told
            if compared.differs and place.question is not None:
                self.asked = (*self.asked, place.question)

    def follow(self, before: Report) -> None:
        """Tell in the next backward what another report has not told so far, since this one replaces it.

        One rank alone may replace its report. The others hear in the next backward what was reported in this one, and
        they may answer together.
        """
        if not (before is self or self._is_alone or self.is_on_cpu):  # there nothing is told later
            self._late.follow(before._late)

    def hand_over(self, guard: Guard | None = None) -> None:
        """Copy this backward's report to the host if it is read later, and let the device act on it in the same launch.

        Args:
            guard: gets the summed pairs, [2 * pairs], and what it is to copy: from and to; None if that is nothing.
        """
        self._late.hand_over(guard, None if guard is None else self.pairs())


class _Parts(NamedTuple):
    """The pairs of a summed report, on any device."""

    told: Tensor  # all of them
    states: Tensor  # those in which a difference is a failure


@dataclass(slots=True)
class _Sums:
    """The summed report of one backward."""

    view: Tensor
    parts: _Parts
    rows: Sequence[Tensor] | None = None  # what the ranks have told, once they were gathered
    reading: Reading | None = None


def _write_bits(packed: Tensor, pair: int, number: int, count: int) -> None:
    for place, bit in enumerate(bits_of(number, count), pair):
        _put(packed, 2 * place, float(bit))
        _put(packed, 2 * place + 1, 1.0 - bit)


def _put(source: Tensor, place: int, value: float) -> None:
    # An assignment to an item would upload the number, and the host would wait.
    source[place : place + 1].fill_(value)
