"""All gradients of a bucket are packed in one call, when it is sent."""

from __future__ import annotations

import torch
from torch import Tensor

from dpfuse.engine.comm_buffer import PLAIN, CommBuffer
from dpfuse.engine.protocols import Feed, PackArguments
from dpfuse_kernels.flatten import flatten_again

__all__ = ["AtOnce"]


class AtOnce(Feed):
    """The usual feed: one call packs all gradients.

    Args:
        buffer: of the bucket.
    """

    def __init__(self, buffer: CommBuffer) -> None:
        self._buffer = buffer
        self.repeats = buffer.format is PLAIN and buffer.flat.is_cuda and not buffer.dtype.is_complex

    def pack(self, grads: list[Tensor | None], arguments: PackArguments) -> None:
        buffer = self._buffer
        if buffer.dtype.is_complex:
            grads = [None if grad is None else torch.view_as_real(grad.resolve_conj()) for grad in grads]
        if arguments.report is not None:
            grads = [*grads, arguments.report]
        if grads:
            buffer.format.pack(
                grads,
                arguments.table,
                scale=arguments.scale,
                counts=arguments.counts,
                factor=arguments.factor,
                residual=arguments.residual,
                matched=True,
            )

    def pack_again(self, grads: list[Tensor | None], report: Tensor | None) -> bool:
        buffer = self._buffer
        tensors = grads if report is None else [*grads, report]
        return flatten_again(tensors, buffer.table, buffer.averaging.pre_scale)
