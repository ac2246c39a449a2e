"""How a report is written as numbers, and what summed numbers say: where each of them lies. Knows no tensor."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import mul
from typing import cast

from dpfuse.engine.number_hash import number_hash
from dpfuse.engine.reading import Reading
from dpfuse.engine.report_layout import ReportLayout, ReportPlace

__all__ = ["CHANGED", "FAILED", "FROZEN", "NO_MEMORY", "RANK_BITS", "ReportFormat", "bits_of"]

FAILED, CHANGED, NO_MEMORY = range(3)  # the first pairs: their first numbers say what has happened on a rank
FLAGS = 3
RANK_BITS = 15  # of the number of a rank that failed or has changed
FROZEN, FROZEN_BITS = "frozen", 2  # the set of frozen parameters, which is compared like a field
UNTOLD, HASH_BITS = "some field", 32  # the hash of the whole numbers of all fields, which no bit of theirs replaces


class ReportFormat:
    """The elements of a report: pairs of compared bits, then numbers that are added up, then one per parameter.

    Each bit that is compared travels as two numbers, b and 1 - b. Over the ranks both sums are above zero exactly
    where the ranks differ, whatever the dtype, the factor and the number of ranks. Of the number of a field its lowest
    bits travel, so that an error can say what differs, and one hash of all numbers beside them. A rank that is not
    compared sends zero in both, except in the first pairs, which tell whether it failed, whether it has changed,
    whether its memory ran out, and what it asks. No rank sends a no to the last two, so a yes is no difference. A rank
    sends the bits of its number only if it failed or has changed.

    Args:
        layout: what it holds besides; what is registered later is not in it.
        param_count: number of parameters of the plan.

    Attributes:
        fields, questions: those of the layout.
        names: of what ranks compare, in the order of their numbers.
        rank: the place of the number of a rank, counted in pairs.
        states: how many elements have the pairs in which a difference is a failure. They are the first.
        told: how many elements have these and the bits that features compare.
        params: the place of the first parameter, counted in elements.
        numel: the number of elements.
    """

    def __init__(self, layout: ReportLayout, param_count: int) -> None:
        self.fields = tuple(layout.fields)
        self.questions = tuple(layout.questions)
        self.names = (*(each.name for each in self.fields), FROZEN, UNTOLD)
        self._widths = (*(each.bits for each in self.fields), FROZEN_BITS, HASH_BITS)
        self._flags = FLAGS + len(self.questions)
        self.rank = self._flags + sum(self._widths)
        start = self.states = 2 * (self.rank + RANK_BITS)
        self._starts: dict[ReportPlace, int] = {}
        for place in sorted(layout.places, key=lambda place: not place.compared):
            self._starts[place] = start
            start += place.width * (1 + place.compared)
        self.params = start
        self.told = next((self._starts[each] for each in self._starts if not each.compared), start)
        self.numel = start + param_count

    @property
    def compared(self) -> list[ReportPlace]:
        """The places in which features have bits compared."""
        return [place for place in self._starts if place.compared]

    def ends(self, place: ReportPlace) -> tuple[int, int]:
        """Return where the elements of a place begin and end."""
        start = self._starts[place]
        return start, start + place.width * (1 + place.compared)

    def elements(self, values: Sequence[object]) -> list[float]:
        """Return all elements of a rank that is well and has used every parameter.

        Args:
            values: as for `pairs`.
        """
        nothing = [0.0] * (2 * RANK_BITS + self.params - self.states)
        return [*self.pairs(values), *nothing, *[1.0] * (self.numel - self.params)]

    def pairs(self, values: Sequence[object]) -> list[float]:
        """Return the first elements of a rank that has not failed, up to those of the rank's number.

        Args:
            values: the number of each field, whether the rank asks each question, whether its numbers are compared, and
                the set of frozen parameters.
        """
        numbers = self.numbers(values)
        numbers.append(number_hash(numbers))
        bits = [bit for number, width in zip(numbers, self._widths, strict=True) for bit in bits_of(number, width)]
        first = [0.0, 1.0, 0.0, 1.0, 0.0, 0.0]  # it has not failed, and the model has not changed
        for asked in values[len(self.fields) : -2]:
            first += float(bool(asked)), 0.0
        is_compared = values[-2]
        if not is_compared:
            return [*first, *[0.0] * (2 * len(bits))]
        return [*first, *(float(number) for bit in bits for number in (bit, 1 - bit))]

    def numbers(self, values: Sequence[object]) -> list[int]:
        """Return the whole numbers that are compared: of the fields, and of the set of frozen parameters."""
        frozen = values[-1]
        assert isinstance(frozen, Collection)
        numbers = cast("Sequence[int]", values[: len(self.fields)])
        return [*map(int, numbers), number_hash(sorted(frozen)) if frozen else 0]

    def says_something(self, told: Sequence[float]) -> bool:
        """Whether a rank has failed, has changed or asks, or ranks differ; `told` is as for `read`."""
        ones, zeros = told[::2], told[1::2]
        return any(ones[: self._flags]) or any(map(mul, ones, zeros))

    def read(self, told: Sequence[float]) -> Reading:
        """Return what the sums over the ranks say; `told` are the first elements, as many as `self.told`."""
        pairs = [(one != 0, other != 0) for one, other in zip(told[::2], told[1::2], strict=True)]
        names = (name for name, width in zip(self.names, self._widths, strict=True) for _ in range(width))
        differ = dict.fromkeys(
            name for name, (one, other) in zip(names, pairs[self._flags :], strict=False) if one and other
        )
        numbers = pairs[self.rank :][:RANK_BITS]
        bits = {place: pairs[start // 2 :][: place.width] for place, start in self._starts.items() if place.compared}
        single = all(one != other for one, other in numbers)
        return Reading(
            pairs[FAILED][0],
            *pairs[CHANGED],
            pairs[NO_MEMORY][0],
            tuple(name for name in differ if name is not UNTOLD) or tuple(differ),
            sum(one << place for place, (one, _) in enumerate(numbers)) if single else None,
            asked=tuple(each for each, (yes, _) in zip(self.questions, pairs[FLAGS:], strict=False) if yes),
            told=tuple(place.name for place, each in bits.items() if any(one and other for one, other in each)),
        )


def bits_of(number: int, count: int) -> list[int]:
    """Return the lowest bits of a number, the lowest first."""
    return [number >> place & 1 for place in range(count)]
