"""The error of ranks of which one has run out of memory. Apart from `dpfuse.errors`, which imports no torch."""

from __future__ import annotations

import torch

from dpfuse.errors import DPFuseError

__all__ = ["OutOfMemoryError", "error_of"]


class OutOfMemoryError(DPFuseError, torch.OutOfMemoryError):
    """A rank has run out of memory, so what all ranks did together has failed.

    The other ranks raise it for a backward in which that rank has raised torch's own error. So one except clause for
    `torch.OutOfMemoryError` acts on all ranks. The rank itself raises it where dpfuse has found no memory.

    Example:
        >>> import dpfuse, torch
        >>> try:
        ...     raise dpfuse.OutOfMemoryError("the backward failed on rank 1 of 2; memory ran out there")
        ... except torch.OutOfMemoryError:
        ...     pass  # skip this batch, as every rank does
    """


def error_of(text: str, *, out_of_memory: bool) -> DPFuseError:
    """Return the error that says `text`, of the class that fits."""
    return OutOfMemoryError(text) if out_of_memory else DPFuseError(text)
