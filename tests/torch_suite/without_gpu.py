"""torch's distributed tests where there is no GPU: every device they ask for is the CPU. Patches its process."""

from __future__ import annotations

import functools
import os
import sys
import unittest
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

__all__ = ["drop_devices", "load", "use"]

CPU = torch.device("cpu")
FACTORIES = ("arange", "empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros")
SKIP_BY_FACTORY = (
    "nccl_skip_if_lt_x_gpu",
    "require_n_gpus_for_nccl_backend",
    "requires_nccl_version",
    "skip_if_lt_x_gpu",
)
SKIP_DIRECTLY = ("skip_if_no_gpu", "skip_if_rocm_multiprocess", "skip_if_small_worldsize")


class Proxy:
    """A module of which some names mean something else.

    Args:
        original: whatever is not in `names` is asked of it.
        names: what is different.
    """

    def __init__(self, original: Any, **names: Any) -> None:
        self.__dict__.update(names)
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def load(world_size: int) -> ModuleType:
    """torch's module of distributed tests, none of them skipped, for a group of `world_size` on the CPU."""
    # torch's TestCase is built on this package, for comparisons that none of these tests makes.
    sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))
    from torch.testing._internal import common_distributed, common_utils

    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(world_size), INIT_METHOD="file://unused")
    with (
        mock.patch.multiple(common_distributed, **dict.fromkeys(SKIP_BY_FACTORY, _keep_all)),
        mock.patch.multiple(common_distributed, **dict.fromkeys(SKIP_DIRECTLY, _keep)),
        mock.patch.multiple(
            common_utils, skip_but_pass_in_sandcastle_if=_keep_all, skip_but_pass_in_sandcastle=_keep_all
        ),
        mock.patch.multiple(unittest, skip=_keep_all, skipIf=_keep_all),
    ):
        from torch.testing._internal.distributed import distributed_test as tests
    tests.nn = Proxy(nn, parallel=Proxy(nn.parallel), Conv2d=SmallConv2d)
    tests.torch = _torch_without_gpu(tests.nn)
    tests.autocast = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    tests.GradScaler = functools.partial(torch.amp.GradScaler, "cpu")
    tests.init_multigpu_helper = lambda world_size, backend: {rank: [rank] for rank in range(world_size)}
    _move_to_cpu_only()
    _order_by_program()
    return tests


def use(cls: type, tests: ModuleType) -> None:
    """Let `tests` wrap with `cls`; the rest of torch goes on with its own class."""
    tests.DistributedDataParallel = tests.nn.parallel.DistributedDataParallel = cls


def drop_devices(cls: type) -> None:
    """Let the constructor of a wrapper take a GPU's number, and leave the module where it is."""
    construct = cls.__init__

    @functools.wraps(construct)
    def without_devices(
        self: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        construct(self, module, None, None, *args, **kwargs)

    cls.__init__ = without_devices


def _keep(test: Callable[..., Any]) -> Callable[..., Any]:
    return test


def _keep_all(*args: Any, **kwargs: Any) -> Callable[..., Any]:
    return _keep


def _order_by_program() -> None:
    """Optimizers in backward and mixed precision of torch's class need streams."""
    torch.Stream = torch.Event = _NoStream
    torch.accelerator.current_stream = _NoStream


def _is_gpu(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith("cuda")
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, torch.device) and value != CPU
    )


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its GPU, given by keyword or by position after `self`, replaced by the CPU."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = CPU
        return function(*args, **kwargs)

    return call


def _moving_to_cpu(move: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(move)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(CPU if _is_gpu(value) else value for value in args)
        return _on_cpu(move)(self, *args, **kwargs)

    return call


def _move_to_cpu_only() -> None:
    torch.Tensor.to = _moving_to_cpu(torch.Tensor.to)
    nn.Module.to = _moving_to_cpu(nn.Module.to)
    torch.Tensor.cuda = nn.Module.cuda = lambda self, *args, **kwargs: self


class SmallConv2d(nn.Conv2d):
    """A convolution of an image's corner: one test, of join(), convolves a million pixels hundreds of times."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return super().forward(image[..., :32, :32])


class _NoStream:
    """A CUDA stream or event where everything happens in program order: all of its methods do nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def _torch_without_gpu(nn_of_tests: Proxy) -> Proxy:
    cuda = Proxy(
        torch.cuda,
        current_device=lambda: CPU,
        device_count=lambda: int(os.environ["WORLD_SIZE"]),
        is_available=lambda: False,
        manual_seed=torch.manual_seed,
        set_device=lambda device: None,
        stream=lambda stream: nullcontext(),
        Stream=lambda device: None,
        synchronize=lambda device=None: None,
    )
    factories = {name: _on_cpu(getattr(torch, name)) for name in FACTORIES}
    return Proxy(torch, nn=nn_of_tests, cuda=cuda, device=lambda name: CPU, **factories)
