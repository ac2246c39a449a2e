"""The time of an all-reduce by its bytes: a table that never decreases. Knows no network and no process group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from dpfuse.arguments import real

__all__ = ["CostTable", "Floats"]

Floats = NDArray[np.float64]
FAR = 2.0**62  # bytes; the last line of a table is extended up to here
DRAWN = 2.0**30  # bytes; the second point of a straight line


def array_of(name: str, value: Any) -> Floats:
    """Return the numbers of an argument as an array.

    Raises:
        TypeError: they are none; the text has the name.
    """
    try:
        if value is not None:
            return np.asarray(value, float)
    except (TypeError, ValueError):
        pass
    raise TypeError(f"{name} must be numbers, got {value!r:.100} of type {type(value).__name__}")


@dataclass(frozen=True)
class CostTable:
    """Seconds of one bucket's all-reduce, as a function of its bytes.

    Times between two points are interpolated linearly, so a start-up time plus a time per byte is exact. Beyond the
    last point the last line continues. Below the first point its time is used.

    Args:
        sizes: bytes, strictly increasing.
        seconds: one time per size, never decreasing.

    Raises:
        ValueError: There are no points, or sizes or times are not ordered as above.

    Example:
        >>> from dpfuse.tune import CostTable
        >>> cost = CostTable([0, 1_000_000], [1e-4, 6e-4])
        >>> round(cost(500_000), 6), round(cost(2_000_000), 6)
        (0.00035, 0.0011)
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        sizes, seconds = (
            tuple(array_of(name, value).ravel().tolist())
            for name, value in (("sizes", self.sizes), ("seconds", self.seconds))
        )
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "seconds", seconds)
        if not sizes or len(sizes) != len(seconds):
            raise ValueError(f"got sizes={sizes} and seconds={seconds}; expected one time per size, at least one")
        if any(not 0 <= value < FAR for value in (*sizes, *seconds)):
            raise ValueError(f"sizes and times must be finite and >= 0, got {sizes} and {seconds}")
        if any(low >= high for low, high in pairwise(sizes)):
            raise ValueError(f"sizes must increase strictly, got {sizes}; CostTable.measured() sorts them")
        if any(low > high for low, high in pairwise(seconds)):
            raise ValueError(f"times must not decrease, got {seconds}; CostTable.measured() averages such times")

    @classmethod
    def affine(cls, latency: float, bandwidth: float) -> CostTable:
        """Return the table of a start-up time plus a time per byte.

        Args:
            latency: seconds of an empty all-reduce.
            bandwidth: bytes per second.

        Raises:
            ValueError: The latency is negative, or the bandwidth is not above zero.

        Example:
            >>> from dpfuse.tune import CostTable
            >>> round(CostTable.affine(20e-6, 100e9)(50_000_000), 6)
            0.00052
        """
        real("latency", latency)
        real("bandwidth", bandwidth)
        if not (latency >= 0 and bandwidth > 0):
            raise ValueError(f"expected latency >= 0 s and bandwidth > 0 bytes/s, got {latency!r} and {bandwidth!r}")
        return cls((0.0, DRAWN), (latency, latency + DRAWN / bandwidth))

    @classmethod
    def measured(cls, sizes: Sequence[float], seconds: Sequence[float]) -> CostTable:
        """Return the table nearest to the measurements. Where times decrease, they become their geometric mean.

        Args:
            sizes: bytes, in any order. Repeated measurements of one size are averaged.
            seconds: for each size, above zero.

        Raises:
            ValueError: There are no measurements, or a time is not above zero.

        Example:
            >>> from dpfuse.tune import CostTable
            >>> [round(second, 9) for second in CostTable.measured([1, 2, 4], [1.0, 9.0, 4.0]).seconds]
            [1.0, 6.0, 6.0]

        Source: isotonic regression by pooling adjacent violators, on logarithms, since errors are relative.
        """
        sizes, seconds = array_of("sizes", sizes).ravel().tolist(), array_of("seconds", seconds).ravel().tolist()
        if len(sizes) != len(seconds) or not len(sizes) or not all(0 < second < math.inf for second in seconds):
            raise ValueError(f"expected a time above 0 s for each size, got sizes={sizes} and seconds={seconds}")
        by_size: dict[float, list[float]] = {}
        for size, second in zip(sizes, seconds, strict=True):
            by_size.setdefault(float(size), []).append(math.log(second))
        blocks: list[tuple[float, int, int]] = []  # sum of logarithms, number of times, number of sizes
        for size in sorted(by_size):
            total, count, width = sum(by_size[size]), len(by_size[size]), 1
            while blocks and blocks[-1][0] / blocks[-1][1] >= total / count:
                before = blocks.pop()
                total, count, width = total + before[0], count + before[1], width + before[2]
            blocks.append((total, count, width))
        pooled = [math.exp(total / count) for total, count, width in blocks for _ in range(width)]
        return cls(tuple(sorted(by_size)), tuple(pooled))

    @overload
    def __call__(self, nbytes: float) -> float: ...
    @overload
    def __call__(self, nbytes: Floats) -> Floats: ...
    def __call__(self, nbytes: float | Floats) -> float | Floats:
        """Return the seconds for a bucket of `nbytes` bytes; an array gives an array."""
        times = np.interp(nbytes, *self._knots)
        return times if isinstance(nbytes, np.ndarray) else float(times)

    @cached_property
    def _knots(self) -> tuple[Floats, Floats]:
        """The points and one more at FAR, because `np.interp` is constant beyond the last point."""
        sizes, seconds = np.array(self.sizes), np.array(self.seconds)
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else 0.0
        return np.append(sizes, FAR), np.append(seconds, seconds[-1] + slope * (FAR - sizes[-1]))
