"""What planning needs to know of a parameter. Knows modules and tensors by duck typing only."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from dpfuse.arguments import instance

__all__ = ["ITEM_SIZE", "ParamSpec", "describe_parameters", "grad_dtype_of"]

ITEM_SIZE = {
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "complex32": 4, "complex64": 8, "complex128": 16,
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class ParamSpec:
    """What planning needs to know of one parameter.

    Args:
        name: qualified name, for tables and errors.
        shape: size of each dimension, in elements.
        dtype: of its gradient, `"float32"` or a torch dtype; kept as its name.
        device: `"cpu"`, `"cuda:0"`, …; parameters of different devices never share a bucket.
        sparse: whether its gradient is sparse; such a parameter forms a bucket alone.

    Raises:
        ValueError: the dtype is not known, or a dimension is negative.

    Example:
        >>> from dpfuse import ParamSpec
        >>> ParamSpec("w", (10, 4), "float32").nbytes
        160
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"
    sparse: bool = False

    def __post_init__(self) -> None:
        instance("name", self.name, str, "a text")
        instance("shape", self.shape, (tuple, list), "a tuple of sizes, such as (4, 2)")
        if type(self.device).__name__ != "device":  # torch is not imported here
            instance("device", self.device, str, 'a device, such as "cpu"')
        instance("sparse", self.sparse, bool, "True or False")
        dtype = str(self.dtype).removeprefix("torch.")
        if dtype not in ITEM_SIZE:
            raise ValueError(
                f"parameter {self.name!r} has dtype {self.dtype!r}; expected one of {', '.join(ITEM_SIZE)}"
            )
        shape = tuple(self.shape)
        if any(size < 0 for size in shape):
            raise ValueError(f"parameter {self.name!r} has shape {shape}; expected sizes >= 0")
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "device", str(self.device))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient, without padding."""
        return self.numel * ITEM_SIZE[self.dtype]


def specs_of(specs: Iterable[ParamSpec]) -> tuple[ParamSpec, ...]:
    """Return the specs that a user has passed as `specs`.

    Raises:
        TypeError: one is none.
    """
    instance("specs", specs, Iterable, "a list of ParamSpec", "those of a plan are its specs")
    found = tuple(specs)
    for index, spec in enumerate(found):
        instance(f"specs[{index}]", spec, ParamSpec, "a ParamSpec")
    return found


def describe_parameters(params: Any, *, kept: Collection[int] = ()) -> list[ParamSpec]:
    """The trainable parameters of a module, a list of parameters, or a list of `ParamSpec`, as specs.

    Args:
        params: something with `named_parameters()` (then each distinct trainable parameter once, depth
            first; the table of an embedding with `sparse=True` is noticed), or an iterable of parameters or specs.
        kept: ids of parameters of a module that count as trainable though they are frozen.

    Returns:
        One spec per parameter, in registration order.

    Raises:
        TypeError: neither of these.
    """
    if hasattr(params, "named_parameters"):
        # `sparse` alone may mean anything, such as how a layer pays attention.
        sparse = {
            id(parameter)
            for module in params.modules()
            if getattr(module, "sparse", False) is True and hasattr(module, "num_embeddings")
            for parameter in module._parameters.values()
            # Others, such as a scale, have dense gradients.
            if parameter is not None and len(parameter.shape) > 1
        }
        return [
            _describe(name, parameter, id(parameter) in sparse)
            for name, parameter in params.named_parameters()
            if parameter.requires_grad or id(parameter) in kept
        ]
    if not isinstance(params, Iterable):
        raise TypeError(
            f"params must be a module, or parameters, or ParamSpec, got {type(params).__name__}; "
            "pass the model itself or list(model.parameters())"
        )
    return [
        spec if isinstance(spec, ParamSpec) else _describe(f"param_{index}", spec, False)
        for index, spec in enumerate(params)
    ]


def grad_dtype_of(parameter: Any) -> Any:
    """Return the dtype of the gradients of a parameter; None where its `grad_dtype` allows any dtype.

    Example:
        >>> import torch
        >>> parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> parameter.grad_dtype = torch.float32
        >>> grad_dtype_of(parameter)
        torch.float32
    """
    return parameter.grad_dtype if getattr(parameter, "is_leaf", False) else parameter.dtype


def _describe(name: str, parameter: Any, sparse: bool) -> ParamSpec:
    try:
        shape = getattr(parameter, "_local_tensor", parameter).shape  # of a DTensor, what this rank has of it
        dtype = str(grad_dtype_of(parameter) or parameter.dtype)
        return ParamSpec(name, tuple(shape), dtype, str(parameter.device), sparse)
    except AttributeError:
        raise TypeError(
            f"{name} is a {type(parameter).__name__}; expected a parameter or a ParamSpec. Or pass the model itself."
        ) from None
