"""Where a report's bits are laid out: each feature registers its places, in the same order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["Field", "Question", "ReportLayout", "ReportPlace"]


@dataclass(frozen=True)
class Field:
    """A number that all ranks must have in common when gradients are averaged.

    Args:
        name: of the field.
        value: gives the number of this rank, of at most 63 bits and a sign. All of it is compared.
        words: what a rank with such a number does, as the end of a sentence that begins with the rank.
        remedy: what to do about a difference.
        bits: how many of its lowest bits travel, to say that it is this field in which ranks differ.
    """

    name: str
    value: Callable[[], int]
    words: Callable[[int], str]
    remedy: str
    bits: int = 2


@dataclass(frozen=True, eq=False)
class ReportPlace:
    """Where a feature writes numbers of this rank, and reads what they come to over all ranks.

    Args:
        name: of the place.
        width: how many numbers, or bits.
        compared: whether they are bits, of which a report tells where the ranks differ; else numbers, of which it
            tells the sums.
        parts: where the named parts of it begin and end.
        question: which all ranks answer where their bits differ; None if there is none.
    """

    name: str
    width: int
    compared: bool
    parts: Mapping[str, slice] = field(default_factory=dict)
    question: Question | None = None


class Question:
    """Something that all ranks do together in a backward, after one of them has asked for it.

    Args:
        name: of the question.
        answer: does it. It is called on every rank in the same backward, with all buckets landed.

    Attributes:
        asks: whether this rank asks, in each backward until it no longer does.
        due: whether every rank asks in the next synchronised backward, and knows that the others do. No bit travels.
    """

    def __init__(self, name: str, answer: Callable[[], None]) -> None:
        self.name = name
        self.answer = answer
        self.asks = False
        self.due = False


class ReportLayout:
    """What the reports of one model hold, besides what every report has. It may grow between two backwards.

    Attributes:
        fields: numbers in which no ranks may differ, the most important first.
        places: in the order in which they lie in a report.
        questions: those for which a rank may ask, in the order in which they are answered.
        answered: these, and those that a difference asks.
        writers: functions that are called once the last bucket is packed, with its plan, its buffer and its report. A
            feature has its function here only while there is something to do.

    Example:
        >>> layout = ReportLayout()
        >>> layout.register("loss", {"sum": 1, "of": 2}).parts
        {'sum': slice(0, 1, None), 'of': slice(1, 3, None)}
    """

    def __init__(self) -> None:
        self.fields: list[Field] = []
        self.places: list[ReportPlace] = []
        self.questions: list[Question] = []
        self.answered: list[Question] = []
        self.writers: list[Callable[..., None]] = []

    def register(
        self,
        name: str,
        width: int | Mapping[str, int],
        *,
        compared: bool = False,
        question: Question | None = None,
    ) -> ReportPlace:
        """Give a feature a place in all reports from the next on.

        Args:
            name: of the place.
            width: how many numbers, or bits; or that of each part, by name.
            compared: whether the ranks' bits are compared, as pairs; a difference fails no backward. Otherwise numbers
                are added up.
            question: which all ranks answer in the backward in which every rank has heard that the bits differ.
        """
        parts: dict[str, slice] = {}
        start = 0
        for part, one in width.items() if isinstance(width, Mapping) else [(name, width)]:
            parts[part] = slice(start, start + one)
            start += one
        place = ReportPlace(name, start, compared, parts, question)
        self.places.append(place)
        self.answered += [question] if question is not None else []
        return place

    def compare(self, *fields: Field) -> None:
        """Have the ranks compare these numbers in each synchronised backward; a difference is an error on all."""
        self.fields += fields

    def ask(self, question: Question) -> None:
        """Let each rank ask this question in any synchronised backward."""
        self.questions.append(question)
        self.answered.append(question)
