"""What PyTorch has in place of the names of Paddle that are not here, and the errors that say so.

Owns the table. Knows nothing of the modules that are here; they ask it about names that they lack.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

import torch
import torch.distributed

__all__ = ["COUNTERPARTS", "answer_imports", "lacks", "text_of"]

PACKAGE = __name__.rpartition(".")[0]  # dpfuse.paddle

# By the path behind `paddle.`: what to use. A name of `torch` or `torch.distributed` is not listed.
COUNTERPARTS: dict[str, str] = {
    "amp": "torch.autocast and dpfuse.GradScaler",
    "audio": "torchaudio",
    "autograd.PyLayer": "torch.autograd.Function",
    "batch": "torch.utils.data.DataLoader(dataset, batch_size=...)",
    "cast": "tensor.to(dtype)",
    "concat": "torch.cat",
    "CPUPlace": "paddle.static.CPUPlace for executors, and torch.device('cpu')",
    "CUDAPlace": "paddle.static.CUDAPlace for executors, and torch.device('cuda', index)",
    "dataset": "torchvision.datasets",
    "device": "torch.device and torch.cuda",
    "device.set_device": "model.to(device), or torch.set_default_device",
    "disable_static": "nothing: modules always run eagerly, beside paddle.static's programs",
    "distributed.alltoall": "torch.distributed.all_to_all",
    "distributed.alltoall_single": "torch.distributed.all_to_all_single",
    "distributed.auto_parallel": "torch.distributed.tensor",
    "distributed.checkpoint": "torch.distributed.checkpoint",
    "distributed.fleet.meta_parallel": "torch.distributed.tensor.parallel and torch.distributed.pipelining",
    "distributed.fleet.utils.recompute": "torch.utils.checkpoint.checkpoint",
    "distributed.fleet.recompute": "torch.utils.checkpoint.checkpoint",
    "distributed.get_group": "the group object itself",
    "distributed.shard_tensor": "torch.distributed.tensor.distribute_tensor",
    "distributed.sharding": "torch.distributed.fsdp.fully_shard",
    "distributed.split": "torch.distributed.tensor.parallel.parallelize_module",
    "distributed.stream": "torch.distributed's functions with async_op=True",
    "distributed.wait": "the wait() of the work that torch.distributed returns",
    "distribution": "torch.distributions",
    "enable_static": "nothing: paddle.static's programs work beside eager modules",
    "fluid": "the same names of Paddle 2, for example paddle.static.Executor",
    "geometric": "the package torch_geometric",
    "get_device": "tensor.device",
    "grad": "torch.autograd.grad",
    "hapi": "paddle.Model",
    "in_dynamic_mode": "nothing: modules always run eagerly",
    "incubate": "torch.nn and torch.func",
    "inference": "torch.export",
    "io.BatchSampler": "torch.utils.data.BatchSampler",
    "io.RandomSampler": "torch.utils.data.RandomSampler",
    "io.SequenceSampler": "torch.utils.data.SequentialSampler",
    "is_compiled_with_cuda": "torch.cuda.is_available",
    "jit": "torch.compile and torch.export",
    "nn.ClipGradByGlobalNorm": "torch.nn.utils.clip_grad_norm_, or model.clip_grad_norm_",
    "nn.Conv2D": "torch.nn.Conv2d",
    "nn.Layer": "torch.nn.Module",
    "nn.functional": "torch.nn.functional",
    "nn.initializer": "torch.nn.init",
    "optimizer": "torch.optim",
    "optimizer.Momentum": "torch.optim.SGD(..., momentum=m)",
    "optimizer.lr": "torch.optim.lr_scheduler",
    "quantization": "the package torchao",
    "reader": "torch.utils.data.DataLoader",
    "regularizer": "the argument weight_decay of torch's optimizers",
    "seed": "torch.manual_seed",
    "set_device": "model.to(device) and batch.to(device), or torch.set_default_device",
    "static.load": "paddle.load",
    "static.load_inference_model": "torch.export.load",
    "static.nn": "torch.nn's modules, called under paddle.static.program_guard",
    "static.nn.fc": "torch.nn.Linear(n, size)(x), under paddle.static.program_guard",
    "static.save": "paddle.save",
    "static.save_inference_model": "torch.export.save",
    "text": "Hugging Face datasets",
    "to_tensor": "torch.as_tensor",
    "vision": "torchvision",
}


def text_of(path: str) -> str:
    """Return one line: what is not here, and what PyTorch has in its place. `path` does not begin with `paddle.`.

    Example:
        >>> from dpfuse.paddle.counterparts import text_of
        >>> text_of("to_tensor")
        "dpfuse.paddle has no 'to_tensor': it holds Paddle's data-parallel systems for PyTorch; use torch.as_tensor"
    """
    here = f"{PACKAGE} has no {path!r}: it holds Paddle's data-parallel systems for PyTorch"
    counterpart = _counterpart(path)
    return here if counterpart is None else f"{here}; use {counterpart}"


def _counterpart(path: str) -> str | None:
    if path in COUNTERPARTS:
        return COUNTERPARTS[path]
    parent, _, name = path.rpartition(".")
    places = {"": torch, "distributed": torch.distributed}
    if parent in places and hasattr(places[parent], name):
        return f"torch.{path}"
    return _counterpart(parent) if parent else None


def lacks(module: str) -> Callable[[str], NoReturn]:
    """Return the `__getattr__` of a module of this package: it raises AttributeError with the counterpart."""
    prefix = module.removeprefix(PACKAGE).removeprefix(".")

    def missing(name: str) -> NoReturn:
        if name.startswith("__"):  # Python and its tools ask for these
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise AttributeError(text_of(f"{prefix}.{name}" if prefix else name), name=name)

    return missing


class _Imports(MetaPathFinder):
    """Raises for `import dpfuse.paddle.nn` and its like; every other import goes on as before."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = fullname.removeprefix(f"{PACKAGE}.")
        if name != fullname and not name.startswith("__") and _counterpart(name) is not None:
            # Without `name=`: Python would put its own text in place of this one for `from dpfuse.paddle import nn`.
            raise ModuleNotFoundError(text_of(name))
        return None


def answer_imports() -> None:
    """Let imports of modules that are not here raise ModuleNotFoundError with the counterpart. Asked last of all."""
    if not any(type(finder).__name__ == _Imports.__name__ for finder in sys.meta_path):
        sys.meta_path.append(_Imports())
