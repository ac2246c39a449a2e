"""InputSpec, the description of a network's input: shape, dtype and name. Holds no data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfuse.paddle.checks import instance

__all__ = ["InputSpec", "checked_shape", "dtype_of"]


def dtype_of(dtype: Any, name: str = "dtype") -> torch.dtype:
    """Return the torch dtype for `dtype`: a torch dtype, a name, or a numpy dtype. Errors call the argument `name`."""
    if isinstance(dtype, torch.dtype):
        return dtype
    text = dtype
    if not isinstance(dtype, str):
        try:
            text = np.dtype(dtype).name if dtype is not None else None  # to numpy None is float64
        except TypeError:
            text = None
    if text is None:
        raise TypeError(f"{name} must be a dtype or its name, got {dtype!r}; pass for example 'float32'")
    found = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name}: got {dtype!r}, expected the name of a torch dtype, such as 'float32' or 'int64'")
    return found


class InputSpec:
    """The description of one input or label of a network.

    Args:
        shape: sizes, the batch first; None or -1 for any size.
        dtype: of torch or numpy, or a name.
        name: the input's name; the key in batches that are dicts.

    Raises:
        TypeError, ValueError: A size is no integer or below -1, or the dtype is unknown.

    Example:
        >>> from dpfuse.paddle.static import InputSpec
        >>> InputSpec([None, 784], "float32", "x")
        InputSpec(shape=(-1, 784), dtype=torch.float32, name='x')

    Source: `paddle.static.InputSpec`.
    """

    def __init__(self, shape: Sequence[int | None], dtype: Any = "float32", name: str | None = None) -> None:
        self.shape = checked_shape(shape, whose="" if name is None else f" of {name!r}")
        self.dtype = dtype_of(dtype)
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name must be a string or None, got {name!r}")
        self.name = name

    @classmethod
    def from_tensor(cls, tensor: Tensor, name: str | None = None) -> InputSpec:
        """Return the description of `tensor`."""
        instance("tensor", tensor, Tensor, "use from_numpy for arrays")
        return cls(tuple(tensor.shape), tensor.dtype, name)

    @classmethod
    def from_numpy(cls, ndarray: np.ndarray[Any, Any], name: str | None = None) -> InputSpec:
        """Return the description of `ndarray`."""
        instance("ndarray", ndarray, np.ndarray, "use from_tensor for tensors")
        return cls(ndarray.shape, ndarray.dtype, name)

    def batch(self, batch_size: int | None) -> InputSpec:
        """Add a batch dimension in front, in place. Return the spec itself."""
        self.shape = (_size(batch_size, "batch_size"), *self.shape)
        return self

    def unbatch(self) -> InputSpec:
        """Remove the first dimension, in place. Return the spec itself."""
        if not self.shape:
            raise ValueError("unbatch: the shape is (), which has no dimension to remove")
        self.shape = self.shape[1:]
        return self

    def __repr__(self) -> str:
        return f"InputSpec(shape={self.shape}, dtype={self.dtype}, name={self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InputSpec) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # batch() changes it in place


def checked_shape(shape: Any, argument: str = "shape", whose: str = "") -> tuple[int, ...]:
    """Return a shape as sizes, with -1 for any size. Errors call it `argument`, followed by `whose`.

    Raises:
        TypeError, ValueError: it is no list of sizes, or one of them cannot be one.
    """
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        raise TypeError(
            f"{argument}{whose} must be a list or tuple of sizes, got {shape!r}; pass for example [None, 784]"
        )
    return tuple(_size(size, f"{argument}[{index}]{whose}") for index, size in enumerate(shape))


def _size(size: Any, what: str) -> int:
    if size is None:
        return -1
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < -1:
        raise ValueError(f"{what}: got {size!r}, expected an integer >= 0, or None or -1 for any size")
    return int(size)
