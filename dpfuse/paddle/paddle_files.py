"""Reads what real Paddle's `paddle.save` wrote, a pickle, without running anything that it names."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from dpfuse.arguments import instance
from dpfuse.model.state_dict import without_prefix
from dpfuse.wrapper import bare_module

__all__ = ["in_torch_layout", "read_paddle_file", "to_torch_state_dict"]

NAMES = "StructuredToParameterName@@"  # the key of Paddle's own names for parameters
SPLIT = "UnpackBigParamInfor@@"  # the key of how large arrays were cut, for protocols 2 and 3
KINDS = "biufc"  # of dtypes: booleans and numbers
STATISTICS = {"_mean": "running_mean", "_variance": "running_var"}


def read_paddle_file(path: str | os.PathLike[str]) -> Any:
    """Return the object of a file that `paddle.save` wrote, with tensors on the CPU.

    The pickle may only build arrays of numbers, and Python's own containers. Paddle stores bfloat16 as uint16.

    Raises:
        ValueError: the file names something else, or is damaged.
    """
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            found = _ArrayUnpickler(file).load()
    except _ForbiddenError as error:
        raise ValueError(
            f"{name!r} names {error}, which a file of parameters does not need, and which could run code; nothing of "
            "it was run. Expected arrays of numbers in dicts, lists and tuples, as paddle.save writes a state dict."
        ) from None
    except Exception as error:  # a damaged pickle raises nearly anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"{name!r} begins as a pickle and cannot be read ({reason}); expected a whole file of paddle.save. Copy it "
            "again, or save it again."
        ) from None
    if isinstance(found, int):  # files of torch.save began with a number before torch 1.6
        raise ValueError(
            f"{name!r} is a file of torch.save in its old format; expected one of paddle.save. Use torch.load, "
            "and save it again."
        )
    return _as_tensors(_joined(found) if isinstance(found, dict) else found)


def to_torch_state_dict(state: Mapping[str, Any], model: nn.Module) -> OrderedDict[str, Tensor]:
    """Rename and transpose a state dict of Paddle's layers for a torch module of the same structure.

    Weights of `Linear` are [in, out] in Paddle and [out, in] in torch. Running statistics are `_mean` and `_variance`
    in Paddle. uint16 becomes bfloat16 where the module has that. What else fits by name and shape stays as it is.

    Args:
        state: of `dpfuse.paddle.load`, by structured names.
        model: the torch module, bare or wrapped. It is not changed.

    Returns:
        A state dict that `model.load_state_dict` takes. Paddle has no batch counters: they are the model's own.

    Raises:
        TypeError: `state` is no dict, or `model` no module.
        ValueError: a name or a shape does not fit.

    Example:
        >>> import torch, dpfuse.paddle as paddle
        >>> state = {"weight": torch.arange(6.0).reshape(3, 2), "bias": torch.zeros(2)}
        >>> paddle.to_torch_state_dict(state, torch.nn.Linear(3, 2))["weight"].tolist()
        [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]

    Source: the layouts of `paddle.nn.Linear` and `paddle.nn.BatchNorm`.
    """
    instance("state", state, Mapping, "a dict by structured names", "pass what dpfuse.paddle.load returned")
    instance("model", model, nn.Module, "a torch.nn.Module")
    bare = bare_module(model)
    expected = bare.state_dict()
    given = without_prefix(state, bare)
    pairs = list(in_torch_layout(given, bare))
    for key, (name, tensor) in zip(given, pairs, strict=False):  # the batch counters follow
        if name not in expected:
            raise ValueError(
                f"{key!r} is in the state dict and not in the model; expected names such as "
                f"{', '.join(map(repr, list(expected)[:3]))}. Build the same layers under the same names."
            )
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{key!r} has shape {tuple(torch.as_tensor(given[key]).shape)} in the state dict, and {name!r} "
                f"{tuple(expected[name].shape)} in the model; expected equal ones, with Linear weights transposed. "
                "Build the same layers."
            )
    found = OrderedDict(pairs)
    if missing := [name for name in expected if name not in found]:
        raise ValueError(
            f"the state dict has no {missing[0]!r} ({len(missing)} names are missing), which the model has; expected "
            "all of its parameters and buffers. Build the same layers."
        )
    wrapped = dict(zip(expected, model.state_dict(), strict=True))
    return OrderedDict((wrapped[name], tensor) for name, tensor in found.items())


def in_torch_layout(state: Mapping[str, Any], module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor, in torch's layout, for each entry of a state dict of Paddle; then the batch counters.

    Args:
        state: by names without a wrapper's prefix.
        module: bare. Names and shapes are not compared with its own.
    """
    expected, modules = module.state_dict(), dict(module.named_modules())
    for key, value in state.items():
        owner, _, leaf = key.rpartition(".")
        layer = modules.get(owner)
        if isinstance(layer, _NormBase):
            leaf = STATISTICS.get(leaf, leaf)
        name = f"{owner}.{leaf}" if owner else leaf
        try:
            tensor = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{key!r} is a {type(value).__name__}, expected a tensor or an array: pass a state dict of Paddle"
            ) from error
        if isinstance(layer, nn.Linear) and leaf == "weight" and tensor.dim() == 2:
            tensor = tensor.t().contiguous()
        if tensor.dtype == torch.uint16 and name in expected and expected[name].dtype == torch.bfloat16:
            tensor = tensor.view(torch.bfloat16)
        yield name, tensor
    yield from ((name, value) for name, value in expected.items() if name.endswith("num_batches_tracked"))


class _ForbiddenError(Exception):
    """A pickle names what it must not."""


def _empty_array(kind: type, shape: tuple[int, ...], code: Any) -> Any:
    if kind is not np.ndarray or tuple(shape) != (0,):
        raise _ForbiddenError(f"an array of type {kind!r} and shape {shape!r} in place of an empty one")
    return np.ndarray.__new__(np.ndarray, (0,), np.int8)


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise _ForbiddenError(f"the encoding {encoding!r}")
    return text.encode("latin1")


def _dtype(text: Any, *flags: Any) -> np.dtype[Any]:
    found = np.dtype(text) if isinstance(text, str) else None
    if found is None or found.kind not in KINDS:
        raise _ForbiddenError(f"the dtype {text!r}")
    return found


def _number(dtype: np.dtype[Any], data: bytes) -> Any:
    return np.frombuffer(data, dtype)[0]


_ALLOWED = {
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "tuple"): tuple,
    ("__builtin__", "tuple"): tuple,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _latin1,
    **{
        (f"numpy.{core}.multiarray", name): builder
        for core in ("core", "_core")
        for name, builder in (("_reconstruct", _empty_array), ("scalar", _number))
    },
}


class _ArrayUnpickler(pickle.Unpickler):
    """Builds arrays and containers; every other name ends it."""

    def find_class(self, module: str, name: str) -> Any:
        """As `pickle.Unpickler.find_class`, for the names that are allowed."""
        found = _ALLOWED.get((module, name))
        if found is None:
            raise _ForbiddenError(f"'{module}.{name}'")
        return found

    def persistent_load(self, pid: Any) -> Any:
        """Refuse references out of the file, which torch's old files have."""
        raise _ForbiddenError("a reference out of the file")


def _joined(state: dict[Any, Any]) -> dict[Any, Any]:
    """Return a state dict without Paddle's tables, and with large arrays in one piece again."""
    found = {key: value for key, value in state.items() if key not in (NAMES, SPLIT)}
    for name, facts in state.get(SPLIT, {}).items():
        found[name] = np.concatenate([found.pop(part) for part in facts["slices"]]).reshape(facts["OriginShape"])
    return found


def _as_tensors(found: Any) -> Any:
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], np.ndarray):
        found = found[1]  # a tensor in a list or dict, as (name, array)
    if isinstance(found, (np.ndarray, np.generic)):
        if found.dtype.kind not in KINDS:
            raise ValueError(f"an array has dtype {found.dtype}; expected numbers")
        array = np.array(found, dtype=found.dtype.newbyteorder("="), order="C")
        return torch.from_numpy(array) if isinstance(found, np.ndarray) else array.item()
    if isinstance(found, dict):
        return {key: _as_tensors(value) for key, value in found.items()}
    if type(found) in (list, tuple):
        return type(found)(map(_as_tensors, found))
    return found
