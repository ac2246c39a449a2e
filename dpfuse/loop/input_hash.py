"""A hash of the inputs of a forward: 8 bits, in which two batches differ with a probability of 255 in 256."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from dpfuse.engine.containers import leaves_in
from dpfuse.loop.rank_words import Word, bits_of

__all__ = ["InputHash"]

BITS = 8
ELEMENTS = 1024  # of each tensor, from all of its parts
PRIME = 65521
PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
TENSORS = (Tensor, torch.nn.Parameter)  # other classes may hold anything


class InputHash:
    """The hash of all inputs since it was made: on a CPU a number, on a GPU a tensor for which nothing waits."""

    def __init__(self) -> None:
        self._empty = True
        self._unknown = False  # whether there was something else than dense tensors and plain values
        self._host = 0
        self._device: Tensor | None = None

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
            with torch.no_grad():
                for tensor in tensors:
                    self._add(bytes_of(tensor))
        except (RuntimeError, TypeError):  # a forward may get any tensor, also one of a dtype without bytes
            self._unknown = True

    def _add(self, sample: Tensor) -> None:
        if not sample.is_cuda:
            self._host = crc32(sample.numpy().tobytes(), self._host)
            return
        factors = torch.arange(1, sample.numel() + 1, device=sample.device) * 40503 % PRIME + 1
        before = 0 if self._device is None else self._device * 31
        self._device = (before + ((sample.long() + 1) * factors).sum()) % PRIME

    def word(self) -> Word:
        """Return the bits: on the GPU, [8], if a tensor lies there."""
        if self._device is None:
            return bits_of(self._host, BITS)
        number = self._device + self._host % PRIME
        return (number >> torch.arange(BITS, device=number.device) & 1).float()


def can_be_read(tensor: Tensor) -> bool:
    """Whether the elements of a tensor are numbers at an address of a CPU or a GPU."""
    return tensor.layout is torch.strided and tensor.device.type in ("cpu", "cuda") and not tensor.is_quantized


def bytes_of(tensor: Tensor) -> Tensor:
    """Return some elements of all parts of a tensor, as bytes, [n]."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        steps = [max(1, size // 16) for size in tensor.shape]
        tensor = tensor[tuple(slice(None, None, step) for step in steps)].contiguous()
    flat = tensor.view(-1)
    some = flat[:: max(1, flat.numel() // ELEMENTS)][:ELEMENTS]
    # One element is contiguous with any stride, but has bytes only with the usual one.
    return some.clone(memory_format=torch.contiguous_format).view(torch.uint8)
