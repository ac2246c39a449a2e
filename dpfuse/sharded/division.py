"""How the elements of a bucket are divided among the ranks. Pure: no tensor is touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from dpfuse.engine.comm_buffer import PLAIN
from dpfuse.engine.exchanges.ordered import OrderedParts
from dpfuse_kernels.squared_norm import ROW

__all__ = ["Division", "Region"]

STEP = 8  # elements: each part begins at a whole multiple, for loads and stores of 128 bits


@dataclass(frozen=True)
class Region:
    """Neighbouring elements of a bucket, of which each rank has one part.

    Args:
        places: of its parameters in the bucket, ascending.
        bounds: where the part of each rank begins in the bucket, and where that of the last one ends, in elements.
        length: from the first bound to the end of the last gradient, in elements; the rest is padding.
        whole: whether each of its parameters lies in the part of one rank.
    """

    places: tuple[int, ...]
    bounds: tuple[int, ...]
    length: int
    whole: bool

    @property
    def begin(self) -> int:
        """Where it begins in the bucket, in elements."""
        return self.bounds[0]

    @property
    def end(self) -> int:
        """Where it ends in the bucket, in elements."""
        return self.bounds[-1]

    @property
    def lengths(self) -> list[int]:
        """The elements of each rank's part."""
        return [end - begin for begin, end in pairwise(self.bounds)]


@dataclass(frozen=True)
class Division:
    """The layout of a bucket: parameters that have an owner first, by owner; then the others, cut into equal parts.

    It is a `Format` of communication buffers.

    Args:
        size: number of ranks.
        owners: the rank that gets all of a parameter, by place; None divides the parameter.
        aligned: whether parameters and parts begin at whole rows. Then what a processor computes for an element cannot
            depend on the number of ranks: it has other code for what is left over at the end of a vector.

    Example:
        >>> from dpfuse.sharded.division import Division
        >>> division = Division(2, (1, None, 0))
        >>> division.places([16, 100, 8], 0, "float32")
        ([8, 24, 0], 136)
        >>> [region.bounds for region in division.regions([16, 100, 8], "float32")]
        [(0, 8, 24), (24, 80, 136)]
    """

    size: int
    owners: tuple[int | None, ...]
    aligned: bool = False

    def places(self, numels: Sequence[int], room: int, dtype: str) -> tuple[list[int], int]:
        """As `Format.places`; there is no room for a report, which no rank may have in part."""
        assert not room
        offsets, regions = self._lay_out(numels, dtype)
        return offsets, regions[-1].end if regions else 0

    table = staticmethod(PLAIN.table)
    pack = staticmethod(PLAIN.pack)
    unpack = staticmethod(PLAIN.unpack)

    def regions(self, numels: Sequence[int], dtype: str) -> tuple[Region, ...]:
        """Return one region for the parameters that have an owner, and one for the others, if there are any.

        Args:
            numels: elements of each gradient.
            dtype: that travels, by name.
        """
        return self._lay_out(numels, dtype)[1]

    def _lay_out(self, numels: Sequence[int], dtype: str) -> tuple[list[int], tuple[Region, ...]]:
        offsets, regions, end = [0] * len(numels), [], 0
        if any(owner is not None for owner in self.owners):
            bounds = [0]
            for rank in range(self.size):
                own = [place for place, owner in enumerate(self.owners) if owner == rank]
                inside, length = self._side_by_side([numels[place] for place in own], dtype)
                for place, offset in zip(own, inside, strict=True):
                    offsets[place] = end + offset
                end = -(-(end + length) // STEP) * STEP
                bounds.append(end)
            owned = tuple(place for place, owner in enumerate(self.owners) if owner is not None)
            regions.append(Region(owned, tuple(bounds), end, whole=True))
        if divided := tuple(place for place, owner in enumerate(self.owners) if owner is None):
            own = [numels[place] for place in divided]
            if self.aligned:
                inside, length = self._side_by_side(own, dtype)
                length = -(-length // (ROW * self.size)) * ROW * self.size
            else:  # with whole rows, the norm of a buffer is that of its parts, bitwise
                inside, length = OrderedParts(self.size, ROW).places(own, 0, dtype)
            for place, offset in zip(divided, inside, strict=True):
                offsets[place] = end + offset
            step = length // self.size
            bounds = [end + step * rank for rank in range(self.size + 1)]
            regions.append(Region(divided, tuple(bounds), inside[-1] + numels[divided[-1]], whole=False))
        return offsets, tuple(regions)

    def _side_by_side(self, numels: Sequence[int], dtype: str) -> tuple[list[int], int]:
        """Return the offset of each gradient in memory of their own, and the length of that."""
        if not self.aligned:
            return PLAIN.places(numels, 0, dtype)
        ends = [*accumulate(-(-numel // ROW) * ROW for numel in numels)]
        return [0, *ends][: len(numels)], ends[-1] if ends else 0
