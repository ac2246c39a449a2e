"""Whether a gradient's memory is its parameter's alone. Knows no bucket."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["is_private"]


def is_private(grad: Tensor) -> bool:
    """Whether nobody but one parameter has `grad` or its memory: no graph, no view, no gradient still on its way.

    A thread of the process group may have both a moment longer than an all-reduce takes.
    """
    return _REFERENCES is not None and not grad.requires_grad and _references(grad) == _REFERENCES


def _references(grad: Tensor) -> tuple[int, int]:
    """How many tensors have its memory, and how many owners the tensor: parameters, autograd, views that users keep."""
    owners: int = grad._use_count()  # type: ignore[attr-defined]
    return torch._C._storage_Use_Count(grad.untyped_storage()._cdata), owners


def _references_of_one() -> tuple[int, int] | None:
    param = torch.zeros(1, requires_grad=True)
    param.grad = torch.zeros(1)
    try:
        return _references(param.grad)
    except AttributeError:  # a torch that does not tell: every gradient may be somebody else's, too
        return None


_REFERENCES = _references_of_one()  # of a gradient that only its parameter has; versions of torch count differently
