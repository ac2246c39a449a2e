"""The number of elements and threads of one program. Plain data; knows no kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["LaunchShape", "launch_shape"]


@dataclass(frozen=True)
class LaunchShape:
    """The two numbers with which a kernel is compiled.

    Args:
        chunk: elements per program, a power of two.
        warps: per program.
    """

    chunk: int
    warps: int


# A bucket of 25 MiB gives each of 132 SMs a dozen programs. With 8 warps a thread moves 16 elements. With 32 elements
# per thread, float16 spilled 120 bytes on sm_90. Not yet chosen by measurement: `python -m bench --gpu --only kernels`.
DEFAULT = LaunchShape(chunk=4096, warps=8)

# (dtype of the tensors, of the buffer) -> least bytes of the buffer -> shape.
SHAPES: dict[tuple[torch.dtype, torch.dtype], dict[int, LaunchShape]] = {
    (torch.float32, torch.float32): {0: DEFAULT},
    (torch.float32, torch.bfloat16): {0: DEFAULT},
    (torch.bfloat16, torch.bfloat16): {0: DEFAULT},
}


def launch_shape(dtype: torch.dtype, wire: torch.dtype, nbytes: int) -> LaunchShape:
    """Return the shape for a buffer of `nbytes` bytes.

    Args:
        dtype: of the tensors.
        wire: of the buffer.
        nbytes: of the buffer.

    Example:
        >>> launch_shape(torch.float32, torch.float32, 25 << 20)
        LaunchShape(chunk=4096, warps=8)
    """
    steps = SHAPES.get((dtype, wire), {0: DEFAULT})
    return steps[max(least for least in steps if least <= nbytes)]
