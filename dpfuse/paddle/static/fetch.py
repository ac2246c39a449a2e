"""What executors hand out: names in, arrays or tensors out, those of several devices merged."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfuse.paddle.static.declarations import VariableInfo
from dpfuse.paddle.static.names import GRAD
from dpfuse.paddle.static.program import Program
from dpfuse.paddle.static.variable import Variable

__all__ = ["Form", "fetch_names", "merged", "to_numpy", "unmerged"]


def fetch_names(fetch_list: Any, program: Program, known: Collection[str], gradients: bool) -> list[str]:
    """The names in `fetch_list`, checked.

    Args:
        fetch_list: names, or variables; None is an empty list.
        program: what is run.
        known: names of the program that need no further check.
        gradients: whether this run computes any.

    Raises:
        TypeError: `fetch_list` is not a list, or holds something else.
        ValueError: a name is unknown, with the nearest ones; or a gradient's in a run without gradients.
    """
    if fetch_list is None:
        return []
    if not isinstance(fetch_list, (list, tuple)):
        raise TypeError(f"fetch_list must be a list of names or variables, got {fetch_list!r}; write [{fetch_list!r}]")
    names = []
    for item in fetch_list:
        name = item.name if isinstance(item, (Variable, VariableInfo)) else item
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
    """The values of all devices, one behind the other along dim 0; scalars become a vector.

    Raises:
        TypeError: they are no tensors, nor numbers.
        ValueError: they differ in more than dim 0.
    """
    tensors = [_tensor_of(value, name) for value in values]
    rows = [tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in tensors]
    if len({(row.shape[1:], row.dtype) for row in rows}) > 1:
        raise ValueError(
            f"the values of {name!r} have shapes {[tuple(row.shape) for row in rows]} on the devices and cannot be "
            "merged; expected the same sizes but for dim 0. Pass return_merged=False."
        )
    whole = torch.cat([row.to(rows[0].device) for row in rows])
    return to_numpy(whole, name) if return_numpy else whole


def unmerged(value: Any, name: str, return_numpy: bool) -> Any:
    """One device's value, copied: the next run may overwrite what it was computed in.

    Raises:
        TypeError: it is no tensor, nor a number.
    """
    tensor = _tensor_of(value, name)
    return to_numpy(tensor, name) if return_numpy else tensor.clone()


class Form:
    """In which form the values of several devices are handed out.

    Args:
        return_numpy: as arrays, or as tensors.
        return_merged: one behind the other, or as a list.
    """

    def __init__(self, return_numpy: bool, return_merged: bool) -> None:
        self._return_numpy = return_numpy
        self._return_merged = return_merged

    def of(self, name: str, values: Sequence[Any]) -> Any:
        """The values of `name` on the devices, copied.

        Raises:
            TypeError, ValueError: as `merged` and `unmerged`.
        """
        if self._return_merged:
            return merged(values, name, self._return_numpy)
        return [unmerged(value, name, self._return_numpy) for value in values]


def to_numpy(tensor: Tensor, name: str) -> np.ndarray[Any, Any]:
    """A copy of a tensor as an array.

    Raises:
        TypeError: numpy has no such dtype.
    """
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
        return torch.as_tensor(value)
    raise TypeError(
        f"the value of {name!r} is a {type(value).__name__}; expected a tensor or a number. Fetch one of its elements."
    )
