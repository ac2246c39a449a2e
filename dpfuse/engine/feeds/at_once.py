"""All gradients of a bucket are packed in one call, when it is sent."""

from __future__ import annotations

from torch import Tensor

from dpfuse.engine.buffer import Buffer
from dpfuse.engine.protocols import Feed, PackArguments

__all__ = ["AtOnce"]


class AtOnce(Feed):
    """The usual feed: one call packs all gradients.

    Args:
        buffer: of the bucket.
    """

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    def pack(self, grads: list[Tensor | None], arguments: PackArguments) -> None:
        self._buffer.pack(grads, arguments)
