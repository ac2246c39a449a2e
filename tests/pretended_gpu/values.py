"""Values on the pretended device, whose kernels do nothing: each operation is run again on the CPU, on the same memory.

Device memory is host memory there. So a CPU tensor can lie over a CUDA tensor, and what an operation writes there is
what the kernel would have written. The kernels of dpfuse are followed by their references. Counts, streams and checks
of the CUDA path stay as they are: the calls are made first.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

import dpfuse
import dpfuse_kernels
from dpfuse.engine.feeds import at_once
from dpfuse_kernels import PointerTable
from dpfuse_kernels.backend import chooses_triton
from dpfuse_kernels.flatten import flatten_reference

__all__ = ["COLLECTIVES", "calculation_of", "compute_kernels", "over"]

Run = Callable[[Callable[[], Any]], Any]  # is given a calculation, and runs it
# The pretended NCCL computes itself. Memory without values, and what only describes memory, need no second run.
COLLECTIVES = ("c10d::", "_c10d_functional::")
LEFT_ALONE = (
    *COLLECTIVES,
    "aten::empty",
    "aten::new_empty",
    "aten::set_",
    "aten::resize_",
    "aten::record_stream",
)


def calculation_of(func: Any, args: Any, kwargs: Any, result: Any) -> Callable[[], None] | None:
    """Return what writes the values that this call of an operation should have written; None if it writes none."""
    name = func._schema.name
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    if any(isinstance(tensor, FakeTensor) for tensor in [*made, *given]):
        return None
    if name.startswith(LEFT_ALONE) or not any(tensor.is_cuda for tensor in [*made, *given]):
        return None
    memory = {tensor.untyped_storage()._cdata for tensor in given}
    fresh = [tensor.untyped_storage()._cdata not in memory for tensor in made]
    writes = any(one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments)
    if not (writes or any(fresh)):
        return None  # a view, or a value for the host
    on_cpu = _on_cpu(args), _on_cpu(kwargs)
    targets = [over(tensor) if tensor.is_cuda else tensor for tensor in made]

    def calculate() -> None:
        values = func(*on_cpu[0], **on_cpu[1])
        found = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        for target, value, is_fresh in zip(targets, found, fresh, strict=len(made) == len(found)):
            if is_fresh:
                target.copy_(value)

    return calculate


def compute_kernels(run: Run) -> None:
    """Let each kernel of dpfuse be launched, and then computed by its reference.

    Args:
        run: is given each calculation, and runs it.
    """
    for name in dpfuse.__all__:
        getattr(dpfuse, name)  # a module that is imported later would keep what is patched here
    ours = [module for name, module in sys.modules.items() if name.split(".")[0] in ("dpfuse", "dpfuse_kernels")]
    for name in dpfuse_kernels.__all__:
        operation = getattr(dpfuse_kernels, name)
        reference = getattr(sys.modules[operation.__module__], f"{name}_reference", None)
        both = None if reference is None else _both(operation, reference, run)
        for module in ours if both is not None else ():
            for owner in (module, *(each for each in vars(module).values() if isinstance(each, type))):
                for place, value in list(vars(owner).items()):
                    if value is operation:
                        setattr(owner, place, both)
                    elif isinstance(value, staticmethod) and value.__func__ is operation:
                        setattr(owner, place, staticmethod(both))
    again = at_once.flatten_again

    def launch_again_and_compute(tensors: Any, table: Any, scale: float) -> bool:
        packed = again(tensors, table, scale)
        if packed and _runs_kernels(table):
            run(lambda: flatten_reference(tensors, table, scale=scale))
        return packed

    at_once.flatten_again = launch_again_and_compute


def _both(launch: Any, reference: Any, run: Run) -> Any:
    takes_matched = "matched" in inspect.signature(reference).parameters

    def launch_and_compute(*args: Any, **kwargs: Any) -> Any:
        result = launch(*args, **kwargs)
        if not _runs_kernels((args, kwargs)):
            return result  # the reference, already
        if not takes_matched:
            kwargs.pop("matched", None)

        def calculate() -> None:
            value = reference(*args, **kwargs)
            if isinstance(result, Tensor):
                over(result).copy_(over(value))

        run(calculate)
        return result

    return launch_and_compute


def _runs_kernels(values: Any) -> bool:
    """Whether a call with these arguments launches a kernel."""
    leaves = tree_leaves(values)
    devices = [leaf.flat.device if isinstance(leaf, PointerTable) else getattr(leaf, "device", None) for leaf in leaves]
    return next((chooses_triton(device) for device in devices if device is not None), False)


def _on_cpu(values: Any) -> Any:
    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return over(value) if value.is_cuda else value
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value

    return tree_map(moved, values)


def over(tensor: Tensor) -> Tensor:
    """Return a CPU tensor over the memory of a tensor on the pretended device."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    found = torch.empty(0, dtype=tensor.dtype).set_(flat, tensor.storage_offset(), tensor.shape, tensor.stride())
    found = found.conj() if tensor.is_conj() else found
    return torch._neg_view(found) if tensor.is_neg() else found
