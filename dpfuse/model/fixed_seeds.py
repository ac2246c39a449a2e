"""Random numbers that depend on the step and the micro-batch, and not on the rank or the number of ranks."""

from __future__ import annotations

import random
from hashlib import blake2s

import numpy as np
import torch

__all__ = ["seed_micro_batch"]


def seed_micro_batch(seed: int, step: int, number: int) -> None:
    """Seed the global generators of torch (on all devices), Python and NumPy.

    Args:
        seed: of the training, the same on all ranks.
        step: of the training.
        number: of the micro-batch in that step.

    Example:
        >>> import torch
        >>> from dpfuse.model.fixed_seeds import seed_micro_batch
        >>> seed_micro_batch(0, 10, 3)
        >>> first = torch.rand(2)
        >>> seed_micro_batch(0, 10, 3)
        >>> torch.equal(torch.rand(2), first)
        True
    """
    digest = blake2s(f"{seed} {step} {number}".encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "little") >> 1  # NumPy and torch take no negative numbers
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
