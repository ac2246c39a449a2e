"""The part of a DTensor that this rank has, as a plain parameter of the engine. Knows no bucket and no group.

With tensor parallelism, parameters are DTensors over one dimension of a mesh. Data parallelism over another dimension
averages their local tensors. The engine gets a `LocalPart` in place of each, and nothing of it knows DTensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpfuse.engine.torch_private import UNSHARED, dtensor_of, holders_of, leave_untraced, local_tensor_of

__all__ = ["LocalPart", "is_divided", "leaf_of", "local_of"]


class LocalPart(nn.Parameter):
    """Has the memory and the facts of a DTensor's local tensor. What belongs to autograd is that of the DTensor.

    Its `grad` is the local tensor of the DTensor's gradient, and assigning it gives the DTensor a DTensor.

    Args:
        whole: the DTensor, which belongs to a module.

    Attributes:
        whole: the DTensor.
    """

    whole: Any

    def __new__(cls, whole: Any) -> LocalPart:
        """Make a tensor of the same memory."""
        part: LocalPart = nn.Parameter.__new__(cls, local_tensor_of(whole).detach(), False)
        part.whole = whole
        return part

    def __init__(self, whole: Any) -> None:
        pass  # all is done in `__new__`, as with any parameter

    def renew(self) -> None:
        """Use the memory that the DTensor has now."""
        self.data = local_tensor_of(self.whole).detach()

    def calling(self, hook: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return a hook for the DTensor that calls `hook` with this part.

        A gradient may have other placements than its parameter, such as sums that are not added up yet. They are
        changed here, with collectives of the tensor-parallel ranks, which all have this backward at this place. And a
        new one may share memory with other gradients, since torch only sees that the DTensors are not the same: it
        gets memory of its own, into which the mean is written.
        """

        def call(_whole: Any) -> None:
            grad = self.grad
            is_new = grad is not None and grad._version == 0 and not self.whole.grad.requires_grad
            if grad is not None and is_new and holders_of(grad.untyped_storage()) > UNSHARED[1]:
                self.grad = grad.clone()
            hook(self)

        leave_untraced(call, calls=True)
        return call

    @property
    def grad(self) -> Tensor | None:
        """The local tensor of the DTensor's gradient, which has the placements of the DTensor from then on."""
        grad = self.whole.grad
        if grad is None:
            return None
        if not is_divided(grad):
            raise TypeError(
                f"the gradient of a DTensor of shape {tuple(self.whole.shape)} is a {type(grad).__name__} of shape "
                f"{tuple(grad.shape)}, expected a DTensor. Assign a DTensor with the placements of the parameter."
            )
        local: Tensor = local_tensor_of(grad)
        if type(local) is Tensor and grad.placements == self.whole.placements:
            return local
        with torch.no_grad():
            local = grad.redistribute(placements=self.whole.placements).to_local()
        self.grad = local
        return local

    @grad.setter
    def grad(self, local: Tensor | None) -> None:
        if local is not None and local.shape != self.shape:  # torch compares all but the local shape
            raise RuntimeError(f"the local gradient has shape {tuple(local.shape)}, expected {tuple(self.shape)}")
        self.whole.grad = None if local is None else dtensor_of(local, self.whole)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """As that of the DTensor."""
        return bool(self.whole.requires_grad)

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """As that of the DTensor."""
        return bool(self.whole.is_leaf)

    @property
    def grad_dtype(self) -> torch.dtype | None:  # type: ignore[override]
        """As that of the DTensor."""
        dtype: torch.dtype | None = self.whole.grad_dtype
        return dtype

    @property
    def _backward_hooks(self) -> Any:  # type: ignore[override]
        return self.whole._backward_hooks

    @property
    def _post_accumulate_grad_hooks(self) -> Any:  # type: ignore[override]
        return self.whole._post_accumulate_grad_hooks


def is_divided(tensor: object) -> bool:
    """Whether this is a DTensor: divided among ranks, or the same on all of them."""
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "device_mesh")


def local_of(tensor: Any) -> Any:
    """Return the part of this rank of a DTensor, and any other tensor as it is."""
    return LocalPart(tensor) if is_divided(tensor) else tensor


def leaf_of(param: Any) -> Any:
    """Return the parameter of the module, of which `param` may be a part."""
    return param.whole if type(param) is LocalPart else param
