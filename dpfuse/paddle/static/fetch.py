"""The results of a run: checks the fetched names, and merges the values of several devices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfuse.paddle.static.names import GRAD
from dpfuse.paddle.static.program import Program
from dpfuse.paddle.static.variable import Variable

__all__ = ["fetch_names", "merged", "to_numpy", "unmerged"]


def fetch_names(fetch_list: Any, program: Program, known: Collection[str], gradients: bool) -> list[str]:
    """Return the names in `fetch_list`, checked. Those in `known` are names of the program."""
    if fetch_list is None:
        return []
    if not isinstance(fetch_list, (list, tuple)):
        raise TypeError(f"fetch_list must be a list of names or variables, got {fetch_list!r}; write [{fetch_list!r}]")
    names = []
    for item in fetch_list:
        name = item.name if isinstance(item, Variable) else item
        if not isinstance(name, str) or name.removesuffix(GRAD) not in known:
            program.check_name(name, "fetch_list:")
        if name.endswith(GRAD) and not gradients:
            raise ValueError(
                f"fetch_list: {name!r} does not exist in a run without gradients; expected a ParallelExecutor with "
                "loss_name, or a program with minimize()"
            )
        names.append(name)
    return names


def merged(values: Sequence[Any], name: str, return_numpy: bool) -> Any:
    """Return the values of all devices, concatenated along dim 0. Scalars become a vector."""
    tensors = [_tensor_of(value, name) for value in values]
    rows = [tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in tensors]
    if len({(row.shape[1:], row.dtype) for row in rows}) > 1:
        raise ValueError(
            f"the values of {name!r} have shapes {[tuple(row.shape) for row in rows]} on the devices and cannot be "
            "merged; expected the same sizes except for dim 0. Pass return_merged=False."
        )
    whole = torch.cat([row.to(rows[0].device) for row in rows])
    return to_numpy(whole, name) if return_numpy else whole


def unmerged(value: Any, name: str, return_numpy: bool) -> Any:
    """Return a copy of one device's value, because the next run may overwrite its memory."""
    tensor = _tensor_of(value, name)
    return to_numpy(tensor, name) if return_numpy else tensor.clone()


def to_numpy(tensor: Tensor, name: str) -> np.ndarray[Any, Any]:
    """Return a copy of a tensor as an array."""
    try:
        return tensor.detach().cpu().clone().numpy()
    except TypeError:
        raise TypeError(
            f"{name!r} has dtype {tensor.dtype}, which numpy does not know; expected another one, or return_numpy=False"
        ) from None


def _tensor_of(value: Any, name: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Number):
        return torch.as_tensor(value, device="cpu")
    raise TypeError(
        f"the value of {name!r} is a {type(value).__name__}; expected a tensor or a number. Fetch one of its elements."
    )
