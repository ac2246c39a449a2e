"""What is hashed after which step: a pass over all tensors, in slices of equal cost. Pure; knows no tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dpfuse_kernels import Piece

__all__ = ["LastEqual", "SliceSchedule", "slices_of"]

CALL = 16 << 10  # bytes that are read in the time that a further tensor costs the host
SLICE = 32 * CALL  # the least that is hashed at a time, since each time costs as much as some further tensors
LEAST, LARGEST = 256 << 10, 16 << 20  # bytes of a piece of a larger tensor
PAGE = 4096  # pieces of one tensor begin at multiples of so many bytes
BOUND, LONGEST = 64, 256  # steps in which all is to be seen, of few tensors and of many
# Steps of those that pass between a hash and its comparison, and until the ranks have found what differs. On a GPU the
# report is read one backward later.
DELAY = 4


def slices_of(sizes: Sequence[int]) -> list[list[Piece]]:
    """Cut tensors into slices, one for each step of a pass.

    Args:
        sizes: of the tensors in bytes.

    Returns:
        The pieces of each slice. Some slices are empty where there are few tensors: then most steps hash nothing.

    Example:
        >>> slices = slices_of([400] * 40)
        >>> len(slices), {place: len(pieces) for place, pieces in enumerate(slices) if pieces}
        (60, {0: 20, 30: 20})
    """
    count = len(sizes)
    steps = max(BOUND, min(count // 4, LONGEST), count // 8) - DELAY
    largest = min(max(LEAST, -(-sum(sizes) // steps)), LARGEST) // PAGE * PAGE
    pieces = [
        Piece(tensor, start, min(largest, size - start))
        for tensor, size in enumerate(sizes)
        for start in range(0, size, largest)
    ]
    total = sum(CALL + piece.nbytes for piece in pieces)
    count = min(steps, -(-total // SLICE))
    slices: list[list[Piece]] = [[] for _ in range(steps)]
    before = 0
    for piece in pieces:
        slices[before * count // total * steps // count].append(piece)
        before += CALL + piece.nbytes
    return slices


class SliceSchedule:
    """Which slice is due. Ranks whose numbers are equal hash the same one.

    Attributes:
        turn: the number of the slice that was hashed last, or passed as empty, over all passes; 0 before the first.
        empty_until: the number of the last slice that is known to be empty, as all are between `turn` and it.

    Example:
        >>> schedule = SliceSchedule()
        >>> for _ in range(3):
        ...     schedule.turn += 1
        >>> schedule.place(slices=2)
        (1, 0)
    """

    def __init__(self) -> None:
        self.turn = self.empty_until = 0

    def place(self, slices: int) -> tuple[int, int]:
        """Return of the slice that was counted last the seed of its pass, of so many slices, and the place in it."""
        return divmod(self.turn - 1, slices)

    def hashed(self, empty: int) -> None:
        """Note how many empty ones follow."""
        self.empty_until = self.turn + empty

    def go_to(self, turn: int) -> None:
        """Go on after another slice, as other ranks do."""
        self.turn = self.empty_until = turn


class LastEqual:
    """Of each slice, the last averaged backward after which the ranks' weights were equal, as far as is known."""

    def __init__(self) -> None:
        self._backwards: dict[int, int] = {}

    def note(self, number: int, backward: int) -> None:
        """Note that a slice was equal after an averaged backward."""
        self._backwards[number] = backward

    def of(self, numbers: Iterable[int]) -> int:
        """Return the last averaged backward after which all of these slices were equal; 0 is the start."""
        return min(self._backwards.get(number, 0) for number in numbers)

    def forget(self) -> None:
        """Forget all, since slices are others now."""
        self._backwards.clear()
