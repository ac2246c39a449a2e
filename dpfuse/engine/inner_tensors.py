"""The memory in which a tensor of another class has its values, and what else it holds. Knows no module and no rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from dpfuse.engine.local_part import LocalPart

__all__ = ["attributes_of", "dense_parts", "has_memory", "inner_tensors", "memories_of", "memory_of", "readable_parts"]

_PLAIN = frozenset({Tensor, nn.Parameter, nn.Buffer, LocalPart})
DEPTH = 2  # of objects in attributes that are looked into: the state of a quantisation may have another one


def inner_tensors(tensor: Tensor) -> Mapping[str, Tensor] | None:
    """Return the tensors with memory in which a tensor has its values, by the attributes that lead to each.

    A tensor with memory of its own is its only one, under the empty name. Others show theirs by `__tensor_flatten__`.

    Returns:
        None where there is no such memory: the class does not show it, or the layout is not strided.

    Example:
        >>> import torch
        >>> from dpfuse.engine.inner_tensors import inner_tensors
        >>> inner_tensors(torch.ones(2))
        {'': tensor([1., 1.])}
        >>> inner_tensors(torch.ones(2).to_sparse()) is None
        True

    Source: the protocol of torch's wrapper subclasses, `torch.utils._python_dispatch.is_traceable_wrapper_subclass`.
    """
    shown = _shown(tensor)
    if shown is None:
        return {"": tensor} if has_memory(tensor) else None
    found: dict[str, Tensor] = {}
    for name, part in shown.items():
        inner = inner_tensors(part)
        if inner is None:
            return None
        found |= {f".{name}{path}": each for path, each in inner.items()}
    return found


def _shown(tensor: Any) -> dict[str, Tensor] | None:
    """Return the tensors that a class shows by torch's protocol, by attribute; None if it does not have that."""
    if type(tensor) in _PLAIN or getattr(tensor, "__tensor_flatten__", None) is None:
        return None
    parts = {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
    return {name: part for name, part in parts.items() if isinstance(part, Tensor)}  # a mesh may be among them


def has_memory(tensor: Tensor) -> bool:
    """Whether the elements of a tensor lie in memory of its own, or will once it is on a device."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            return False
        if type(tensor) in _PLAIN or tensor.is_meta:
            return True
        try:
            return not tensor.numel() or Tensor.data_ptr(tensor) != 0
        except RuntimeError:  # a class whose memory is never to be read
            return False


def memory_of(tensor: Tensor) -> Tensor:
    """Return a plain tensor on the memory of this one: itself if it is plain, else an alias.

    The alias reads and writes the values without any operation of the tensor's class.
    """
    if type(tensor) in _PLAIN:
        return tensor
    with torch.no_grad(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunctionSubclass():
        return Tensor.detach(tensor)


def dense_parts(tensor: Tensor) -> Sequence[Tensor] | None:
    """Return dense tensors that have the values of one of another layout, maybe as copies; None for any other one."""
    if tensor.is_nested:
        return tensor.unbind()
    if tensor.is_mkldnn:
        return (tensor.to_dense(),)
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return tensor.indices(), tensor.values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return None


def readable_parts(tensor: Tensor) -> list[Tensor]:
    """Return tensors with memory that together have the values of a tensor, maybe as copies; none if unknown."""
    inner = inner_tensors(tensor)
    if inner is not None:
        return [memory_of(each) for each in inner.values()]
    if tensor.is_quantized:
        return [tensor.int_repr(), tensor.dequantize()]
    shown = _shown(tensor)
    parts = dense_parts(tensor.detach()) if shown is None else shown.values()
    return [each for part in parts or () for each in readable_parts(part)]


def attributes_of(tensor: Tensor) -> dict[str, Tensor]:
    """Return what a tensor of a class of its own holds in attributes, such as the scales of a quantised weight.

    Parameters are left out, since they belong to a module, and so are modules. One that trains has its values in its
    memory, and what it holds beside that may be of one rank. The names are as those of `inner_tensors`.
    """
    if type(tensor) in _PLAIN or (tensor.requires_grad and has_memory(tensor)):
        return {}
    return dict(_tensors_in(vars(tensor), {id(tensor)}, DEPTH, dotted=True))


def memories_of(tensor: Tensor) -> dict[str, Tensor]:
    """Return all memory that is known to make the values of a tensor: that of `inner_tensors`, and of its attributes.

    A plain tensor is its only one, under the empty name.
    """
    inner = inner_tensors(tensor)
    found = {path: memory_of(each) for path, each in (inner or {}).items()}
    if inner is None or "" in inner:
        for path, attribute in attributes_of(tensor).items():
            for rest, each in (inner_tensors(attribute) or {}).items():
                found.setdefault(path + rest, memory_of(each))
    return found


def _tensors_in(items: Mapping[Any, Any], seen: set[int], depth: int, *, dotted: bool) -> Iterator[tuple[str, Tensor]]:
    for key, value in items.items():
        path = f".{key}" if dotted else f"[{key!r}]"
        if id(value) in seen or isinstance(value, (nn.Parameter, nn.Module, type, ModuleType)):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield path, value
            continue
        inside: Mapping[Any, Any] | None = None
        if isinstance(value, Mapping):
            inside = value
        elif isinstance(value, (list, tuple)):
            inside = dict(enumerate(value))
        elif not callable(value):
            inside = getattr(value, "__dict__", None)
        if inside and depth:
            attributes = not isinstance(value, (Mapping, list, tuple))
            for rest, each in _tensors_in(inside, seen, depth - 1, dotted=attributes):
                yield path + rest, each
