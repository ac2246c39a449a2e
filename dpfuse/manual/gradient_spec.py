"""A gradient that a user averages by hand: what the plan needs to know of it, and whether it can be averaged."""

from __future__ import annotations

import torch
from torch import Tensor

from dpfuse.engine.averaging import averaging_for
from dpfuse.engine.param_spec import ParamSpec

__all__ = ["spec_of_gradient"]


def spec_of_gradient(name: str, param: Tensor, grad: Tensor) -> ParamSpec:
    """Return the spec of the gradient of `param`, which gets memory of its own for each element.

    Raises:
        TypeError: it is sparse, or of a dtype that cannot be averaged.
    """
    shape = tuple(param.shape)
    if grad.layout != torch.strided:
        raise TypeError(
            f"{name} of shape {shape} has a {grad.layout} gradient, which cannot be fused; expected a dense one. Build "
            "its embedding with sparse=False."
        )
    spec = ParamSpec(name, shape, str(grad.dtype), str(grad.device))
    try:
        averaging_for(spec.dtype, 1)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    if any(step == 0 and size > 1 for step, size in zip(grad.stride(), grad.shape, strict=True)):
        # Elements that share memory cannot hold different means.
        param.grad = grad.clone(memory_format=torch.contiguous_format)
    return spec
