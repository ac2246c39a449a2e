"""The data of a forward that raised, to tell another attempt at it from the next batch. Knows no module and no rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpfuse.engine.containers import leaves_in

__all__ = ["FailedBatch"]


class FailedBatch:
    """What a forward got that raised. It is kept until the next forward begins, so that its memory is not used again.

    Args:
        inputs: the arguments of the forward.
    """

    def __init__(self, inputs: Any) -> None:
        leaves = leaves_in(inputs)
        # Not the tensors, which may keep a graph alive.
        self._tensors = [each.detach() for each in leaves if _is_known(each)]
        self._versions = [each._version for each in self._tensors]
        self._others = [each for each in leaves if not issubclass(type(each), Tensor)]

    def has(self, inputs: Any) -> bool:
        """Whether these arguments are the same data, or a part of it.

        There must be a tensor, and each must lie in memory of one that the forward got and that was not written since.
        Everything else must be what it got, apart from flags. So a batch that shares only a constant with it, such as a
        mask, is another one.
        """
        leaves = leaves_in(inputs)
        tensors = [each for each in leaves if issubclass(type(each), Tensor)]
        if not tensors or not all(map(self._holds, tensors)):
            return False
        return all(map(self._knows, (each for each in leaves if not issubclass(type(each), Tensor))))

    def _holds(self, tensor: Tensor) -> bool:
        if not _is_known(tensor):
            return False
        start, end = _range_of(tensor)
        for kept, version in zip(self._tensors, self._versions, strict=True):
            first, last = _range_of(kept)
            if kept.device == tensor.device and first <= start and end <= last and kept._version == version:
                return True
        return False

    def _knows(self, value: object) -> bool:
        if value is None or type(value) is bool:
            return True
        plain = type(value) in (int, float, str)
        return any(value is each or (plain and type(each) is type(value) and each == value) for each in self._others)


def _is_known(value: Any) -> bool:
    """Whether this is a tensor whose memory can be compared, and whose writes are counted."""
    if type(value) is not Tensor or value.layout is not torch.strided:
        return False
    return not (value.is_meta or value.is_inference()) and value.numel() > 0


def _range_of(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte, and after the last one."""
    start = tensor.data_ptr()
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (steps + 1) * tensor.element_size()
