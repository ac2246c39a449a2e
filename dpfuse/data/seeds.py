"""Random numbers that depend on what is computed, and not on the rank, the worker or the number of ranks."""

from __future__ import annotations

import random
from hashlib import blake2s

import numpy as np
import torch

__all__ = ["seed_by"]


def seed_by(*numbers: int, on_gpus: bool = True) -> None:
    """Seed the global generators of torch, Python and NumPy.

    Args:
        numbers: what is computed, such as the seed of a training, the step, and the micro-batch.
        on_gpus: whether torch's generators of GPUs are seeded, too.

    Example:
        >>> import torch
        >>> from dpfuse.data.seeds import seed_by
        >>> seed_by(0, 10, 3)
        >>> first = torch.rand(2)
        >>> seed_by(0, 10, 3)
        >>> torch.equal(torch.rand(2), first)
        True
    """
    digest = blake2s(" ".join(map(str, numbers)).encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "little") >> 1  # NumPy and torch take no negative numbers
    # Not torch.manual_seed: as long as CUDA is not in use, that formats the stack of the program, for an error later.
    torch.default_generator.manual_seed(value)
    if on_gpus and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
