"""Is the mean over the ranks what this rank alone has? If it is on all ranks, these compute the same."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from struct import Struct

import torch
from torch import Tensor

from dpfuse.engine.comm_buffer import CommBuffer
from dpfuse.engine.sample import Sample, are_comparable, sample_of, values_of
from dpfuse.engine.streams import HostCopy
from dpfuse.loop.stepping_optimizer import best_of
from dpfuse.loop.watched_gradient import has_plain_class

__all__ = ["OwnAndMean"]

APART = 0.01  # of the length of a gradient; what travels in 16 bits is rounded less
ELEMENTS = 4096  # that are copied of the gradient that is compared
FEW = 3  # different values, of which fewer cannot tell
FLOAT = Struct("f")
# Of the largest value: an average of equal numbers may differ from them by its rounding. Narrow wires round more.
ROUNDED, ROUNDED_16 = 1e-5, 0.01


class OwnAndMean:
    """Copies some elements of a gradient before and after the average: on a GPU for a later look.

    Attributes:
        look: a parameter, what its gradient was before the average, and by which factor of the mean that was multiplied
            already; None where nothing is looked at.
    """

    def __init__(self) -> None:
        self._param: Tensor | None = None
        self._before: Tensor | None = None
        self._copy: HostCopy | None = None  # [2, elements]
        self.look: tuple[Tensor, Sample, float] | None = None

    def look_at(self, param: Tensor, buffer: CommBuffer) -> None:
        """Copy before the average, on a CPU, so that `was_equal` can tell. No average has written its gradient yet.

        Where the gradient lies in the buffer of its bucket, it was packed there, and multiplied for the mean. Here and
        in `was_equal` stands what `has_strides` asks, since each tenth step has these looks.
        """
        grad, self.look = param.grad, None
        if type(grad) is not Tensor or grad.layout is not torch.strided or grad.is_complex():
            return
        if param.requires_grad and grad.is_cpu and grad.numel():
            low, high = buffer.table.storage_range
            self.look = param, sample_of(grad), buffer.averaging.pre_scale if low <= grad.data_ptr() < high else 1.0

    def was_equal(self) -> bool:
        """Whether the average that has ended left what this rank had, as if all ranks had the same gradient.

        It may differ by rounding, is finite, and not all zero.
        """
        look, self.look = self.look, None
        if look is None:
            return False
        param, before, factor = look
        grad = param.grad
        now = sample_of(grad) if type(grad) is Tensor and grad.layout is torch.strided else None
        if now is None or not are_comparable(before, now):
            return False
        if type(before.memory) is bytes and type(now.memory) is bytes and now.dtype is torch.float32:
            (one,), (other,) = FLOAT.unpack_from(before.memory), FLOAT.unpack_from(now.memory)
            # Nearly always the first ones differ, which takes no operation of torch. NaN is not close to anything.
            if not abs(one - factor * other) <= 100 * ROUNDED * abs(one):
                return False
        own, mean = (values_of(each).float() for each in (before, now))
        mean = mean if factor == 1.0 else mean * factor
        largest = float(own.abs().max())
        rounded = ROUNDED_16 if now.dtype.itemsize == 2 else ROUNDED
        return 0 < largest < inf and bool((mean - own).abs().max() <= rounded * largest)

    def packed(self, params: Mapping[str, Tensor]) -> None:
        """Copy before the average.

        Args:
            params: those of the bucket that is packed last, by name. No average has written their gradients yet.
        """
        fitting = {
            name: param
            for name, param in params.items()
            # A frozen one keeps what it has.
            if param.requires_grad and has_plain_class(param) and has_strides(param.grad)
        }
        self._param, self._before = None, None
        if fitting:
            self._param = best_of(fitting)[-1][1]
            self._before = values_in(self._param)

    def delivered(self) -> None:
        """Copy after the average."""
        if self._param is not None and self._before is not None and has_strides(self._param.grad):
            now = values_in(self._param)
            if now.shape == self._before.shape and now.device == self._before.device:
                self._copy = HostCopy(torch.stack([self._before, now]))
        self._param = self._before = None

    def is_parallel(self) -> bool:
        """Whether the last mean has the direction of this rank's own gradient. Waits for the device.

        It is False where that is unknown, and after a first answer for the same mean.
        """
        copy, self._copy = self._copy, None
        if copy is None:
            return False
        before, now = torch.tensor(copy.read(), dtype=torch.float64, device="cpu")
        if len(before.abs().unique()) < FEW:
            return False
        parallel = before * (before @ now) / (before @ before)
        return bool((now - parallel).norm() <= APART * now.norm())


def has_strides(grad: Tensor | None) -> bool:
    """Whether a gradient is there, with elements that can be copied."""
    return grad is not None and has_plain_class(grad) and grad.layout is torch.strided and not grad.is_complex()


def values_in(param: Tensor) -> Tensor:
    """Return a copy of elements from all parts of a gradient, [n] float32."""
    assert param.grad is not None
    return values_of(sample_of(param.grad, ELEMENTS, spread=True)).float()
