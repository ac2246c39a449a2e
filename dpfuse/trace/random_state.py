"""The states of the random number generators of a process, as hashes."""

from __future__ import annotations

import random
import sys
import zlib

import torch

__all__ = ["random_states"]


def random_states() -> dict[str, str]:
    """Return a number of eight characters for each generator: torch's, CUDA's, Python's and NumPy's.

    NumPy's is there if the program has imported NumPy, and CUDA's if it has used the GPU. No state is changed.

    Example:
        >>> import torch
        >>> from dpfuse.trace.random_state import random_states
        >>> before = random_states()["torch"]
        >>> before == random_states()["torch"], before == (torch.rand(1), random_states()["torch"])[1]
        (True, False)
    """
    states = {"torch": torch.get_rng_state().numpy().tobytes(), "python": repr(random.getstate()).encode()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = keys.tobytes() + repr((kind, rest)).encode()
    return {name: f"{zlib.crc32(state):08x}" for name, state in states.items()}
