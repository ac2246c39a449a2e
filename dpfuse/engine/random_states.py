"""The global random number generators of a process: torch's, CUDA's, Python's and NumPy's. Knows no model and no file.

A state is a dict by generator, as a checkpoint has it. Of GPUs only the current one counts, and only if it is in use.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from hashlib import blake2s
from typing import Any
from zlib import crc32

import numpy as np
import torch

from dpfuse.engine.tensor_hash import hash_of, text_of

__all__ = ["get_random_state", "hashes_of_random_state", "seed_by", "seed_from", "set_random_state"]


def get_random_state(*, on_gpus: bool = True) -> dict[str, Any]:
    """Return the state of each generator, as tensors, numbers and tuples.

    Args:
        on_gpus: whether the GPU's is among them.
    """
    numpy_state: Any = np.random.get_state()
    kind, keys, *rest = numpy_state
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.tensor(keys.astype(np.int64), device="cpu"), *rest),
    }
    if on_gpus and torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the state that `get_random_state()` returned.

    Example:
        >>> import torch
        >>> from dpfuse.engine.random_states import get_random_state, set_random_state
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


def hashes_of_random_state() -> dict[str, str]:
    """Return eight characters for each generator. No state is changed.

    Example:
        >>> import torch
        >>> from dpfuse.engine.random_states import hashes_of_random_state
        >>> before = hashes_of_random_state()["torch"]
        >>> before == hashes_of_random_state()["torch"]
        True
        >>> _ = torch.rand(1)
        >>> before == hashes_of_random_state()["torch"]
        False
    """
    state = get_random_state()
    kind, keys, *rest = state["numpy"]
    state["python"] = repr(state["python"]).encode()
    state["numpy"] = keys.numpy().astype(np.uint32).tobytes() + repr((kind, rest)).encode()
    found = {name: crc32(each) if isinstance(each, bytes) else hash_of(each) for name, each in state.items()}
    return {name: text_of([int(number)]) for name, number in found.items()}


def seed_by(*numbers: int, on_gpus: bool = True) -> None:
    """Seed each generator by what is computed, and not by the rank, the worker or the number of ranks.

    Args:
        numbers: such as the seed of a training, the step, and the micro-batch.
        on_gpus: whether torch's generators of GPUs are seeded, too.

    Example:
        >>> import torch
        >>> from dpfuse.engine.random_states import seed_by
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
    _seed_others(value)


def seed_from(state: Mapping[str, Any], rank: int) -> None:
    """Seed each generator by what `get_random_state()` returned elsewhere, for a rank that has no state of its own.

    The same state and rank give the same numbers. Ranks get different ones.

    Example:
        >>> import torch
        >>> from dpfuse.engine.random_states import get_random_state, seed_from
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
    torch.manual_seed(seed)  # also of GPUs, and before CUDA is in use
    _seed_others(seed)


def _seed_others(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
