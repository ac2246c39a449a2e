"""The global random number generators: of torch, Python and NumPy."""

from __future__ import annotations

import random
from collections.abc import Mapping
from hashlib import blake2s
from typing import Any

import numpy as np
import torch

__all__ = ["get_random_state", "seed_from", "set_random_state"]


def get_random_state() -> dict[str, Any]:
    """Return the state of each generator, as tensors, numbers and tuples; of GPUs only the current one, if in use."""
    numpy_state: Any = np.random.get_state()
    kind, keys, *rest = numpy_state
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.tensor(keys.astype(np.int64), device="cpu"), *rest),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the state that `get_random_state()` returned.

    Example:
        >>> import torch
        >>> from dpfuse.checkpoint.random_state import get_random_state, set_random_state
        >>> before = get_random_state()
        >>> first = torch.rand(3)
        >>> set_random_state(before)
        >>> torch.equal(torch.rand(3), first)
        True
    """
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_from(state: Mapping[str, Any], rank: int) -> None:
    """Seed each generator by what `get_random_state()` returned elsewhere, for a rank that has no state of its own.

    The same state and rank give the same numbers. Ranks get different ones.

    Example:
        >>> import torch
        >>> from dpfuse.checkpoint.random_state import get_random_state, seed_from
        >>> state = get_random_state()
        >>> def first(rank):
        ...     seed_from(state, rank)
        ...     return torch.rand(1)
        >>> first(1) == first(1), first(1) == first(2)
        (tensor([True]), tensor([False]))
    """
    told = blake2s(rank.to_bytes(4, "little"), digest_size=8)
    for name in ("torch", "cuda"):  # a training on a GPU may draw nothing on the CPU
        if name in state:
            told.update(state[name].numpy().tobytes())
    _, keys, *rest = state["numpy"]
    told.update(keys.numpy().tobytes() + repr((rest, state["python"])).encode())
    seed = int.from_bytes(told.digest(), "little") >> 1
    torch.manual_seed(seed)  # also of GPUs
    random.seed(seed)
    np.random.seed(seed % 2**32)
