"""How the C library treats large blocks of the host that are freed. Knows no bucket."""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["keep_freed_memory"]

BLOCK = 31 << 20  # bytes: glibc takes no block of 32 MB or more for a pattern


@cache
def keep_freed_memory() -> None:
    """Let glibc keep the memory of freed gradients for the next step, once in this process.

    At first it gives each block above 128 KB back to the system, and the next step waits for new pages. Once a larger
    block was freed, it keeps those up to that size. Torch's DDP frees one when it makes its buckets again. Gradients
    that are reduced in place need no such block.

    Source: `M_MMAP_THRESHOLD` in mallopt(3).
    """
    torch.empty(BLOCK, dtype=torch.uint8, device="cpu")  # freed at once, and never touched
