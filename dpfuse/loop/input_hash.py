"""A hash of the inputs of a forward: 8 bits, in which two batches differ with a probability of 255 in 256."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpfuse.engine.containers import leaves_in
from dpfuse.engine.sample import sample_of, values_of
from dpfuse.engine.tensor_hash import Hash, hash_of
from dpfuse.loop.compared_words import Word, bits_of

__all__ = ["InputHash"]

BITS = 8
ELEMENTS = 1024  # of each tensor, from all of its parts
PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
TENSORS = (Tensor, torch.nn.Parameter)  # other classes may hold anything


class InputHash:
    """The hash of all inputs since it was made: on a CPU a number, on a GPU a tensor for which nothing waits."""

    def __init__(self) -> None:
        self._empty = True
        self._unknown = False  # whether there was something else than dense tensors and plain values
        self._hash: Hash = 0

    @property
    def known(self) -> bool:
        """Whether there was a tensor, and all inputs could be hashed."""
        return not (self._empty or self._unknown)

    def add(self, inputs: Any) -> None:
        """Hash these inputs, which may be containers."""
        leaves = leaves_in(inputs)
        tensors = [leaf for leaf in leaves if type(leaf) in TENSORS]
        plain = all(type(leaf) in (*TENSORS, *PLAIN) for leaf in leaves)
        if not plain or not all(map(can_be_read, tensors)):
            self._unknown = True
        if self._unknown or not tensors:
            return
        self._empty = False
        try:
            for tensor in tensors:
                self._hash = hash_of(some_of(tensor.detach()), self._hash)
        except (RuntimeError, TypeError):  # a forward may get any tensor, also one of a dtype without bytes
            self._unknown = True

    def word(self) -> Word:
        """Return the bits: on the GPU, [8], if a tensor lies there."""
        number = self._hash
        if isinstance(number, int):
            return bits_of(number, BITS)
        return (number >> torch.arange(BITS, device=number.device) & 1).float()


def can_be_read(tensor: Tensor) -> bool:
    """Whether the elements of a tensor are numbers at an address of a CPU or a GPU."""
    return tensor.layout is torch.strided and tensor.device.type in ("cpu", "cuda") and not tensor.is_quantized


def some_of(tensor: Tensor) -> Tensor:
    """Return a copy of some elements of all parts of a tensor, [n]."""
    if not tensor.is_contiguous():  # all of its elements would be copied first
        tensor = tensor[tuple(slice(None, None, max(1, size // 16)) for size in tensor.shape)]
    return values_of(sample_of(tensor, ELEMENTS, spread=True))
