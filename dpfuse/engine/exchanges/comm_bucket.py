"""What a communication hook sees of a bucket and its communication buffer, with the methods of torch's `GradBucket`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["CommBucket"]


class CommBucket:
    """The argument `bucket` of a communication hook; has the methods of `torch.distributed.GradBucket`.

    Args:
        index: place in the order of communication; 0 is sent first.
        buffer: all gradients of the bucket, [elements], without padding, and not divided by anything; or one
            sparse gradient.
        params: whose gradients these are, in the order in which they lie in `buffer`.
        is_last: whether no bucket of this backward comes after it.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, 2))
        >>> bucket = CommBucket(0, torch.arange(4.0), [weight], is_last=True)
        >>> bucket.gradients()
        [tensor([[0., 1.],
                [2., 3.]])]
    """

    def __init__(self, index: int, buffer: Tensor, params: Sequence[Tensor], *, is_last: bool) -> None:
        self._index = index
        self._buffer = buffer
        self._params = params
        self._is_last = is_last

    def __repr__(self) -> str:
        last = ", the last" if self._is_last else ""
        return f"CommBucket({self._index}{last}: {self._buffer.numel()} elements of {self._buffer.dtype})"

    def index(self) -> int:
        """Return the place in the order of communication, the same on all ranks; 0 is sent first."""
        return self._index

    def is_last(self) -> bool:
        """Whether no bucket of this backward comes after it."""
        return self._is_last

    def buffer(self) -> Tensor:
        """Return all gradients, [elements], complex ones as pairs of real numbers; or one sparse gradient."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Let `buffer()` and `gradients()` return another tensor. The result is still that of the hook's future."""
        if not isinstance(buffer, Tensor):
            raise TypeError(f"buffer must be a tensor, got {type(buffer).__name__}; pass the new flat gradients")
        self._buffer = buffer

    def parameters(self) -> list[Tensor]:
        """Return the parameters, in the order of their gradients in `buffer()`."""
        return list(self._params)

    def gradients(self) -> list[Tensor]:
        """Return the part of `buffer()` of each parameter, in its shape; none if the bucket is sparse.

        Gradients of complex parameters are complex, although the buffer holds pairs of real numbers. As in torch,
        elements are in the order of memory, so those of a channels-last weight are permuted.
        """
        if self._buffer.layout is not torch.strided:
            return []
        flat, views, start = self._buffer.view(-1), [], 0
        for param in self._params:
            numel = param.numel() * (2 if param.is_complex() else 1)
            part = flat[start : start + numel]
            views.append(
                torch.view_as_complex(part.view(*param.shape, 2)) if param.is_complex() else part.view(param.shape)
            )
            start += numel
        return views
