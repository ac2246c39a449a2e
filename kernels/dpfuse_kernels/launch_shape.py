"""The number of elements and threads of one program. Plain data; knows no kernel."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEFAULT", "LaunchShape", "launch_shape"]


@dataclass(frozen=True)
class LaunchShape:
    """The two numbers with which a kernel is compiled.

    Args:
        chunk: elements per program, a power of two.
        warps: per program.
    """

    chunk: int
    warps: int


# A thread moves 16 elements. With 32, a pack of float16 spilled 120 bytes on sm_90. A bucket of 25 MiB gives each of
# 132 SMs a dozen programs. Not yet chosen by measurement: `python -m bench --gpu --only kernels`.
DEFAULT = LaunchShape(chunk=4096, warps=8)

# Mean elements per tensor, at most -> shape. A program serves one tensor only. In a long one, most threads of a program
# for a short tensor would have nothing to move, and fewer programs fit on an SM at the same time.
SHORT = {1024: LaunchShape(chunk=1024, warps=2), 2048: LaunchShape(chunk=2048, warps=4)}


def launch_shape(mean: float) -> LaunchShape:
    """Return the shape for tensors of `mean` elements on average.

    Example:
        >>> launch_shape(1000.0), launch_shape(160_000.0)
        (LaunchShape(chunk=1024, warps=2), LaunchShape(chunk=4096, warps=8))
    """
    return next((shape for most, shape in SHORT.items() if mean <= most), DEFAULT)
