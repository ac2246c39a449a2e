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
        if buffer.format is PLAIN and not buffer.dtype.is_complex:
            self.again = flatten_again

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
