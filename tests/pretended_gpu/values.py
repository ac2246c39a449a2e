"""Values on the pretended device, whose kernels do nothing: each operation is run again on the CPU, on the same memory.

Device memory is host memory there. So a CPU tensor can lie over a CUDA tensor, and what an operation writes there is
what the kernel would have written. The kernels of dpfuse are followed by their references. Counts, streams and checks
of the CUDA path stay as they are: the calls are made first.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import dpfuse
import dpfuse_kernels
from dpfuse.engine.feeds import at_once
from dpfuse_kernels import PointerTable
from dpfuse_kernels.backend import chooses_triton
from dpfuse_kernels.flatten import flatten_reference

__all__ = ["Values", "compute_kernels"]

# The pretended NCCL computes itself. Memory without values, and what only describes memory, need no second run.
LEFT_ALONE = ("c10d::", "aten::empty", "aten::new_empty", "aten::set_", "aten::resize_", "aten::record_stream")


class Values(TorchDispatchMode):
    """Computes what operations on the pretended device write. Backwards of other threads are seen, too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_cuda]
        if name.startswith(LEFT_ALONE) or not (made or any(tensor.is_cuda for tensor in given)):
            return result
        memory = {tensor.untyped_storage()._cdata for tensor in given}
        fresh = [tensor.untyped_storage()._cdata not in memory for tensor in made]
        writes = any(one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments)
        if not (writes or any(fresh)):
            return result  # a view, or a value for the host
        values = func(*_on_cpu(args), **_on_cpu(kwargs))
        found = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        for tensor, value, is_fresh in zip(made, found, fresh, strict=len(made) == len(found)):
            if is_fresh:
                _over(tensor).copy_(value)
        return result


def compute_kernels(monkeypatch: Any) -> None:
    """Let each kernel of dpfuse be launched, and then computed by its reference."""
    for name in dpfuse.__all__:
        getattr(dpfuse, name)  # a module that is imported later would keep what is patched here
    ours = [module for name, module in sys.modules.items() if name.split(".")[0] in ("dpfuse", "dpfuse_kernels")]
    for name in dpfuse_kernels.__all__:
        operation = getattr(dpfuse_kernels, name)
        reference = getattr(sys.modules[operation.__module__], f"{name}_reference", None)
        for module in ours if reference is not None else ():
            if vars(module).get(name) is operation:
                monkeypatch.setattr(module, name, _both(operation, reference))
    again = at_once.flatten_again

    def launch_again_and_compute(tensors: Any, table: Any, scale: float) -> bool:
        launched = again(tensors, table, scale)
        if launched:
            flatten_reference(tensors, table, scale=scale)
        return launched

    monkeypatch.setattr(at_once, "flatten_again", launch_again_and_compute)


def _both(launch: Any, reference: Any) -> Any:
    takes_matched = "matched" in inspect.signature(reference).parameters

    def launch_and_compute(*args: Any, **kwargs: Any) -> Any:
        result = launch(*args, **kwargs)
        if not _runs_kernels((args, kwargs)):
            return result  # the reference, already
        if not takes_matched:
            kwargs.pop("matched", None)
        return reference(*args, **kwargs)

    return launch_and_compute


def _runs_kernels(values: Any) -> bool:
    """Whether a call with these arguments launches a kernel."""
    leaves = tree_leaves(values)
    devices = [leaf.flat.device if isinstance(leaf, PointerTable) else getattr(leaf, "device", None) for leaf in leaves]
    return next((chooses_triton(device) for device in devices if device is not None), False)


def _on_cpu(values: Any) -> Any:
    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return _over(value) if value.is_cuda else value
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value

    return tree_map(moved, values)


def _over(tensor: Tensor) -> Tensor:
    """Return a CPU tensor over the memory of a tensor on the pretended device."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    over = torch.empty(0, dtype=tensor.dtype).set_(flat, tensor.storage_offset(), tensor.shape, tensor.stride())
    over = over.conj() if tensor.is_conj() else over
    return torch._neg_view(over) if tensor.is_neg() else over
