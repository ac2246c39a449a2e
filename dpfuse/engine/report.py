"""What the ranks tell each other with the last bucket: which rank failed, what differs, which parameters were used.

The report is summed with the gradients, so it costs no collective of its own. Its size does not depend on the number
of ranks, apart from one element per parameter. It is in no plan and counts in no plan's bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2s
from operator import mul
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.comm import collective
from dpfuse.engine.streams import HostCopy, capturing
from dpfuse.engine.window import Field, Window
from dpfuse_kernels.spoil import any_pair

__all__ = ["ALL_WELL", "SLOTS", "Outcome", "Reading", "Report"]

FLAGS = 3  # the first pairs: a rank has failed, or has changed its module, or asks; their first elements say so
RANK_BITS = 16  # of the number of a rank that failed or has changed
NUMBER_BITS = 32  # of a number that only the device may know
HASH_BITS = 16  # of the set of frozen parameters
SLOTS = (
    "nonfinite",
    "weight",
    "bad_weight",
    "weighing",
    "squares",
    "measured",
    "nonfinite_values",
)  # sums of numbers that features write


@dataclass(slots=True)
class Outcome:
    """What has happened on this rank in the running backward."""

    missing: tuple[int, ...] = ()  # parameters without a gradient, of the buckets sent so far
    frozen: frozenset[int] = frozenset()  # parameters that were frozen since they were planned
    just_frozen: frozenset[int] = frozenset()  # those of them that an open window may have accumulated before
    late: tuple[int, ...] = ()  # parameters that became ready after their bucket was sent
    error: Exception | None = None  # the first error of this rank
    failed: bool = False  # whether an exception ended it
    changed: bool = False  # whether the model has changed since the buckets were made
    torn: bool = False  # whether a collective, or a user's hook in its place, has raised

    @property
    def well(self) -> bool:
        """Whether the gradients of this rank are right."""
        return not (self.failed or self.late or self.error is not None)


@dataclass(frozen=True)
class Reading:
    """What a report says, summed over the ranks.

    Attributes:
        any_failed, any_well: whether a rank failed, and whether a rank did not.
        any_changed, any_unchanged: whether a rank has another model than the buckets are for, or the same.
        any_asks: whether a rank asks for an exchange.
        any_number: whether the ranks' numbers of a feature differ, which is no failure.
        differing: names of the fields in which ranks differ.
        rank: the one rank that failed or has changed; None if there is none, or several, or if it is unknown.
        rows: for each rank whether it failed, whether its model has changed, and its value of each field, which is -1
            of a rank without inputs. Empty where they were not gathered.
    """

    any_failed: bool = False
    any_well: bool = True
    any_changed: bool = False
    any_unchanged: bool = True
    any_asks: bool = False
    differing: tuple[str, ...] = ()
    rank: int | None = None
    rows: tuple[tuple[int, ...], ...] = ()
    any_number: bool = False

    @property
    def all_well(self) -> bool:
        """Whether the gradients of all ranks are right."""
        return not (self.any_failed or self.any_changed or self.differing)

    def failed(self) -> list[int]:
        """Return the ranks that failed, as far as they are known."""
        if self.rows:
            return [rank for rank, row in enumerate(self.rows) if row[0]]
        return [] if self.rank is None or not self.any_failed else [self.rank]

    def changed(self) -> list[int]:
        """Return the ranks whose model has changed, as far as they are known."""
        if self.rows:
            return [rank for rank, row in enumerate(self.rows) if row[1]]
        return [] if self.rank is None or not self.any_changed else [self.rank]


ALL_WELL = Reading()


class Report:
    """The report: pairs of elements, then one element per slot of a feature, then one per parameter.

    Each bit that is compared travels as two numbers, b and 1 - b. Over the ranks both sums are above zero exactly
    where the ranks differ, whatever the dtype, the factor and the number of ranks. A rank without inputs sends zero
    in both, except in the first pairs, which tell whether it failed, whether it has changed, and whether it asks for an
    exchange. No rank answers no to the last question, so it is no difference. A rank sends the bits of its number only
    if it failed or has changed.

    A feature may have a number of 32 bits compared that only the device knows. A difference in it is no failure: the
    feature decides what follows.

    Args:
        group: the ranks.
        param_count: number of parameters of the plan.
        fields: the numbers that are compared, besides what every report has.
        window: knows whether this rank has inputs.
        dtype: the dtype in which it is packed: float32, float64, or that of gradients that travel as one of these.
        device: the device on which it is packed.
        has_number: whether a number of a feature is compared.
        extra_count: how many further numbers a feature has added up.

    Attributes:
        numel: the number of its elements.
        number: where the bits of that number are, as pairs, [32, 2], in what is packed; zeros are no number. None
            where none is compared.
        differs: whether the ranks' numbers differed in the backward of which every rank has heard by now: on a CPU
            this backward, on CUDA the one before.
        is_on_cpu: whether it lies on the CPU, where every rank reads it as soon as it has landed.
        asked: whether a rank has asked for an exchange of which every rank has heard by now: on a CPU in this
            backward, on CUDA in the one before.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        param_count: int,
        fields: Sequence[Field],
        window: Window,
        dtype: torch.dtype,
        device: torch.device,
        *,
        has_number: bool = False,
        extra_count: int = 0,
    ) -> None:
        self.group = group
        self._is_alone = group.size() == 1
        self._fields = list(fields)
        self._window = window
        self.asked = False
        self._asked_early = False  # on CUDA, in this backward, since this rank has waited for its report
        compared = FLAGS + sum(each.bits for each in fields) + HASH_BITS
        number = 2 * (compared + RANK_BITS)
        slots = number + 2 * NUMBER_BITS * has_number
        extras = slots + len(SLOTS)
        self._places = _Places(compared, number, slots, extras, extras + extra_count)
        self.numel = self._places.flags + param_count
        self._values: list[object] = [*[0] * len(fields), False, False, frozenset()]  # what `_source` tells
        nothing = [0.0] * (2 * RANK_BITS + self._places.flags - number)
        start = [*self._pairs_of(self._values), *nothing, *[1.0] * param_count]
        self._source = torch.tensor(start, dtype=dtype, device=device)  # of a rank that is well
        self.number = self._source[number:slots].view(-1, 2) if has_number else None
        self.differs = False
        self._differed_early = False  # on CUDA, in this backward, since this rank has waited for its report
        self.is_on_cpu = self._source.is_cpu
        self._sums: _Sums | None = None  # of this backward
        self._latest: _Sums | None = None  # of this one, or the one before
        self._copy: HostCopy | None = None  # of the pairs, on CUDA
        self._host: _HostPairs | None = None  # of that copy; on a CPU, of this backward's
        self._pending = False  # whether the copy has those of an earlier backward, which were not read
        self._usual = b""  # the pairs that said last that all is well

    def source(self, outcome: Outcome) -> Tensor:
        """Return what this rank packs, [numel]."""
        self._sums = None
        values: list[object] = [each.value() for each in self._fields]
        values += self._window.asks, self._window.without_inputs, outcome.frozen
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
            _put(source, self._places.flags + index, 0.0)
        if outcome.changed:
            self._write_bits(source, 1, 1, 1)
        if not outcome.well:
            self.write_failure(source)
        if outcome.changed:
            self._write_bits(source, self._places.ranks, self.group.rank(), RANK_BITS)
        return source

    def _tell(self, values: list[object]) -> None:
        now = self._pairs_of(values)
        if self.is_on_cpu:  # one operation, also where most of them change
            self._source[: len(now)].copy_(torch.tensor(now, dtype=self._source.dtype, device="cpu"))
        else:
            for place, (old, new) in enumerate(zip(self._pairs_of(self._values), now, strict=True)):
                if old != new:
                    _put(self._source, place, new)
        self._values = values

    def write_failure(self, packed: Tensor) -> None:
        """Write into what is packed, [numel], that this rank has failed."""
        self._write_bits(packed, 0, 1, 1)
        self._write_bits(packed, self._places.ranks, self.group.rank(), RANK_BITS)

    def write_slot(self, packed: Tensor, name: str, value: Tensor) -> None:
        """Write into what is packed, [numel], a number that only the device may know, [], unscaled."""
        packed[self._places.slots + SLOTS.index(name)].copy_(value)

    def write_numbers(self, packed: Tensor, first: str, values: Sequence[float]) -> None:
        """Write into what is packed, [numel], numbers that the host knows, from the slot `first` on, unscaled."""
        start = self._places.slots + SLOTS.index(first)
        packed[start : start + len(values)].copy_(torch.tensor(values, dtype=torch.float64, device="cpu"))

    def slots(self) -> Tensor:
        """Return the sums of the numbers of all slots over the ranks, [slots], on the device, without waiting."""
        assert self._sums is not None
        return self._sums.view[self._places.slots : self._places.extras]

    def slot(self, name: str) -> Tensor:
        """Return the sum of that number over the ranks, [], on the device, without waiting."""
        assert self._sums is not None
        return self._sums.view[self._places.slots + SLOTS.index(name)]

    def write_extras(self, packed: Tensor, values: Tensor, start: int = 0) -> None:
        """Write into what is packed, [numel], some of the further numbers of a feature, unscaled. Nothing waits.

        Args:
            packed: the report, as it is packed.
            values: [n], on its device or on the CPU.
            start: which of the numbers is the first.
        """
        place = self._places.extras + start
        late = packed.is_cuda and not values.is_cuda
        values = values.to(packed.dtype).pin_memory() if late else values
        packed[place : place + len(values)].copy_(values, non_blocking=late)

    def extras(self) -> Tensor:
        """Return the sums of these numbers over the ranks, [extra_count], on the device, without waiting."""
        assert self._sums is not None
        return self._sums.view[self._places.extras : self._places.flags]

    def landed(self, view: Tensor) -> None:
        """Note where the summed report lies, [numel]; it stays valid until the bucket is packed again."""
        before = self._latest
        # It is usually where the one before was, and making a slice takes a microsecond.
        parts = None if before is None or before.view is not view else before.parts
        if parts is None:
            told = view[: self._places.slots]
            parts = _Parts(told, told[: self._places.number])
        self._latest = self._sums = _Sums(view, parts)

    def used_somewhere(self, indices: Collection[int]) -> set[int]:
        """Return those of `indices` that some rank used. Waits for the device."""
        assert self._sums is not None
        flags = self._sums.view[self._places.flags :].tolist()
        return {index for index in indices if flags[index]}

    @property
    def unreadable(self) -> bool:
        """Whether a CUDA graph is being captured, so that nothing on the device can be read."""
        return capturing()

    @property
    def was_read(self) -> bool:
        """Whether the host has read this backward's report. On CUDA it may read it one backward later, or never."""
        return self.is_on_cpu or not (self._pending or capturing())

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
        self.asked = False
        if not self.is_on_cpu and capturing():
            self.differs = False
            return ALL_WELL if outcome.well else Reading(any_failed=True, rank=self.group.rank())
        if self._is_alone and outcome.well and not outcome.changed:
            return ALL_WELL  # no other rank can report anything
        if self.is_on_cpu:
            host = self._host
            if host is None or host.values is not sums.parts.told:
                host = self._host = _HostPairs(sums.parts.told)
            if self._is_usual(host):
                self.differs = False
                return ALL_WELL
            reading = self._interpret(host.values.tolist())
            self.asked, self.differs = reading.any_asks, reading.any_number
        elif not wait:
            return self._read_later(sums)
        else:
            before = self._read_pending() if self._pending else ALL_WELL
            self._tell_of(before)
            if not before.all_well and outcome.well:
                return before
            reading = self._interpret(sums.parts.told.tolist())
            self._asked_early, self._differed_early = reading.any_asks, reading.any_number
        if not reading.all_well and gather:
            sums.reading = self._with_rows(reading, outcome)
            return sums.reading
        sums.reading = reading
        return reading

    def alarm(self) -> Tensor:
        """Return whether some rank reports a failure or a difference, as a bool, [], on the device, without waiting.

        It is called only if this rank itself has neither failed nor changed.
        """
        return any_pair(self.pairs())

    def pairs(self) -> Tensor:
        """Return the summed pairs, [2 * pairs], on the device: where ranks differ, both numbers of a pair are not 0."""
        assert self._sums is not None
        return self._sums.parts.states

    def _pairs_of(self, values: Sequence[object]) -> list[float]:
        """Return the compared pairs of a rank that has not failed."""
        *numbers, asks, without_inputs, frozen = values
        bits: list[int] = []
        for number, each in zip(numbers, self._fields, strict=True):
            assert isinstance(number, int)
            bits += _bits(number, each.bits)
        assert isinstance(frozen, Collection)
        bits += _bits(_hash(frozen), HASH_BITS)
        first = [0.0, 1.0, 0.0, 1.0, float(bool(asks)), 0.0]  # it has not failed, and the model has not changed
        if without_inputs:
            return [*first, *[0.0] * (2 * len(bits))]
        return [*first, *(float(number) for bit in bits for number in (bit, 1 - bit))]

    def _write_bits(self, packed: Tensor, pair: int, number: int, count: int) -> None:
        for place, bit in enumerate(_bits(number, count), pair):
            _put(packed, 2 * place, float(bit))
            _put(packed, 2 * place + 1, 1.0 - bit)

    def _interpret(self, states: list[float]) -> Reading:
        pairs = [(one != 0, other != 0) for one, other in zip(states[::2], states[1::2], strict=True)]
        differing = [name for name, (one, other) in zip(self._names(), pairs, strict=False) if one and other]
        numbers, told = pairs[self._places.ranks :][:RANK_BITS], pairs[self._places.number // 2 :]
        single = all(one != other for one, other in numbers)
        return Reading(
            *pairs[0],
            *pairs[1],
            pairs[2][0],
            tuple(name for name in dict.fromkeys(differing) if name),
            sum(one << place for place, (one, _) in enumerate(numbers)) if single else None,
            any_number=any(one and other for one, other in told),
        )

    def _names(self) -> Iterator[str]:
        yield from [""] * FLAGS
        for each in self._fields:
            yield from [each.name] * each.bits
        yield from ["frozen"] * HASH_BITS

    def _with_rows(self, reading: Reading, outcome: Outcome) -> Reading:
        values = [-1 if self._window.without_inputs else each.value() % (1 << each.bits) for each in self._fields]
        row = torch.tensor(
            [not outcome.well, outcome.changed, *values, len(outcome.frozen)],
            dtype=torch.int64,
            device=collective.group_device(self.group),
        )
        rows = tuple(tuple(map(int, each.tolist())) for each in collective.all_gather(row, self.group))
        return replace(reading, rows=rows)

    def _tell_of(self, before: Reading) -> None:
        """Note what every rank has heard by now of the backward before."""
        self.asked, self._asked_early = before.any_asks or self._asked_early, False
        self.differs, self._differed_early = before.any_number or self._differed_early, False

    def _read_later(self, sums: _Sums) -> Reading:
        before = self._read_pending() if self._pending else ALL_WELL
        self._tell_of(before)
        if self._copy is None:
            self._copy = HostCopy(sums.parts.told)
            self._host = _HostPairs(self._copy.arriving)
        else:
            self._copy.take(sums.parts.told)
        self._pending = True
        return before

    def _read_pending(self) -> Reading:
        assert self._copy is not None
        assert self._host is not None
        self._pending = False
        self._copy.wait()
        return ALL_WELL if self._is_usual(self._host) else self._interpret(self._host.values.tolist())

    def _is_usual(self, host: _HostPairs) -> bool:
        """Whether all is well, nothing differs and no rank asks, as in nearly every backward."""
        memory = host.memory.raw
        if memory == self._usual:
            return True
        told = host.values.tolist()
        ones, zeros = told[::2], told[1::2]
        if any(ones[:FLAGS]) or any(map(mul, ones, zeros)):
            return False
        self._usual = memory  # the ranks compare other numbers now, and have the same ones
        return True


class _Places(NamedTuple):
    """Where the parts of a report begin."""

    ranks: int  # the bits of a rank's number, as a place among the pairs
    number: int  # the bits of a feature's number, as an element
    slots: int  # the numbers of features, as an element
    extras: int  # further numbers of one feature, as an element
    flags: int  # one element for each parameter


class _Parts(NamedTuple):
    """The pairs of a summed report, on any device."""

    told: Tensor  # all of them
    states: Tensor  # those without a feature's number


class _HostPairs:
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


@dataclass(slots=True)
class _Sums:
    """The summed report of one backward."""

    view: Tensor
    parts: _Parts
    reading: Reading | None = None


def _bits(number: int, count: int) -> list[int]:
    return [number >> place & 1 for place in range(count)]


def _hash(frozen: Collection[int]) -> int:
    if not frozen:
        return 0
    return int.from_bytes(blake2s(repr(sorted(frozen)).encode(), digest_size=2).digest(), "big") | 1


def _put(source: Tensor, place: int, value: float) -> None:
    # An assignment to an item would upload the number, and the host would wait.
    source[place : place + 1].fill_(value)
