"""Launches the real, compiled kernels on a driver that only takes down what reaches it; no GPU. Run as a program.

Prints one JSON object: per scenario the calls of Triton's launcher, and what dpfuse counted. A process of its own,
since Triton's interpreter and its compiler do not share one.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

STREAM = 1234
FUNCTION = 77


class Recorder:
    """Stands where Triton's launcher does, and takes down its arguments. `fault` may refuse them first."""

    calls: ClassVar[list[dict[str, Any]]] = []
    fault: ClassVar[Callable[..., None] | None] = None

    def __init__(self, source: Any, metadata: Any) -> None:
        self.kernel = source.fn.__name__
        self.signature = list(source.signature.values())
        self.constants = dict(zip(source.fn.arg_names, self.signature, strict=True))

    def __call__(self, *arguments: Any) -> None:
        if Recorder.fault is not None:
            Recorder.fault(*arguments)
        grid, stream, function, metadata = arguments[:3], *arguments[3:6]
        told, enter, leave, *values = arguments[6:]
        count = len(values) - self.signature.count("constexpr")
        for hook in (enter, leave):
            if hook is not None:
                hook(told)
        Recorder.calls.append(
            {
                "kernel": self.kernel,
                "grid": grid,
                "stream": stream,
                "function": function,
                "metadata": list(metadata),
                "told": told is not None,
                "hooks": [enter is not None, leave is not None],
                "values": [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values[:count]],
                "constants": [str(value) for value in values[count:]],
                "signature": self.signature,
            }
        )


def use_recorder() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: STREAM + device,
            launcher_cls=Recorder,
            utils=SimpleNamespace(
                load_binary=lambda *arguments: (1, FUNCTION, 32, 0, 1024),
                get_device_properties=lambda device: {"max_shared_mem": 200_000},
                unload_module=lambda module: None,
            ),
        )
    )


def new_table(dtype: torch.dtype = torch.float32, wire: torch.dtype = torch.float32) -> Any:
    from dpfuse_kernels import PointerTable, Slot

    return PointerTable(torch.zeros(9000, dtype=wire), [Slot("a", 0, (9000,), (1,))], dtype)


def seen(dispatcher: Any, **facts: Any) -> dict[str, Any]:
    calls, Recorder.calls = Recorder.calls, []
    return {"calls": calls, "launches": dispatcher.launches, "bound": dispatcher.bound_launches, **facts}


def both_ways() -> dict[str, Any]:
    """Three packs with one factor, one with the factor 0.0, whose bits are the number 0."""
    from dpfuse_kernels.flatten import flatten

    table, tensor = new_table(), torch.ones(9000)
    for scale in (1 / 3, 1 / 3, 1 / 3, 0.0):
        flatten([tensor], table, scale=scale)
    return seen(table.launcher.dispatcher)


def every_kernel() -> dict[str, Any]:
    """Per kernel and compile-time choice one launch of each way."""
    from dpfuse_kernels.flatten import flatten
    from dpfuse_kernels.multiply import multiply
    from dpfuse_kernels.squared_norm import squared_norm
    from dpfuse_kernels.unflatten import unflatten

    table, tensor = new_table(wire=torch.bfloat16), torch.ones(9000)
    for _ in range(2):
        flatten([tensor], table, scale=0.5)
        flatten([tensor], table)
        unflatten(table, [tensor], scale=0.5)
        flatten([tensor], table, scale=0.5, counts=torch.zeros(1, dtype=torch.int32))
        flatten([tensor], table, factor=torch.tensor(0.5), residual=torch.zeros(9000))
        squared_norm([tensor], table)
        multiply([tensor], table, torch.tensor(0.5))
    return seen(table.launcher.dispatcher)


def eight_bits() -> dict[str, Any]:
    """The kernels of eight-bit blocks, each twice."""
    from dpfuse_kernels import MxTable, Slot, mx_bytes
    from dpfuse_kernels.dequantize import dequantize
    from dpfuse_kernels.quantize import quantize

    flat = torch.zeros(mx_bytes(9000), dtype=torch.uint8)
    table = MxTable(flat, [Slot("a", 0, (9000,), (1,))], torch.float32, torch.float8_e4m3fn)
    tensor, residual = torch.ones(9000), torch.zeros(table.elements)
    for _ in range(2):
        quantize([tensor], table, scale=0.5, residual=residual)
        dequantize(table, [tensor])
    return seen(table.launcher.dispatcher)


def without_a_table() -> dict[str, Any]:
    """The kernels over flat tensors alone, each twice; the step and the learning rate of AdamW change."""
    from dpfuse_kernels import adamw_step, mx_bytes, sum_parts, sum_quantized
    from dpfuse_kernels.launcher import shared_dispatcher

    grad, param, first, second = torch.zeros(4, 9000).unbind()
    packed = torch.zeros(2, mx_bytes(512), dtype=torch.uint8)
    for step, lr in ((1, 0.5), (2, 0.25)):
        adamw_step(grad, param, first, second, step=step, lr=lr)
        sum_parts(torch.zeros(2, 9000), param, first)
        sum_quantized(packed, packed[0].clone(), torch.float8_e4m3fn)
    return seen(shared_dispatcher(param.device))


def moved_table() -> dict[str, Any]:
    """The chunk table lies off its alignment at the second launch, and where it was at the third."""
    from dpfuse_kernels.flatten import flatten

    table, tensor = new_table(), torch.ones(9000)
    flatten([tensor], table)
    rows = table.launcher._rows
    shifted = torch.empty(rows.numel() + 1, dtype=torch.int64)[1:].view_as(rows).copy_(rows)
    for table.launcher._rows in (shifted, rows):
        table.launcher.repeatable.clear()  # else the first launch would be made again, with the rows that it had
        flatten([tensor], table)
    return seen(table.launcher.dispatcher)


def listened() -> dict[str, Any]:
    """Somebody listens to the launches after the first two."""
    from triton import knobs

    from dpfuse_kernels.flatten import flatten

    table, tensor, heard = new_table(), torch.ones(9000), []
    for number in range(4):
        if number == 2:
            knobs.runtime.launch_enter_hook.add(heard.append)
        flatten([tensor], table)
    knobs.runtime.launch_enter_hook.remove(heard.append)
    return seen(table.launcher.dispatcher, heard=len(heard))


def refused() -> dict[str, Any]:
    """The launcher does not take what is bound."""
    from dpfuse_kernels.flatten import flatten

    refusals = []

    def refuse(*arguments: Any) -> None:
        if arguments[7] is None:
            refusals.append(1)
            raise TypeError("function takes exactly 18 arguments")

    table, tensor = new_table(), torch.ones(9000)
    Recorder.fault = refuse
    for _ in range(4):
        flatten([tensor], table)
    Recorder.fault = None
    return seen(table.launcher.dispatcher, refusals=len(refusals))


def broken() -> dict[str, Any]:
    """The launch itself fails, which may be the fault of an earlier kernel: it is neither hidden nor repeated."""
    from dpfuse_kernels.flatten import flatten

    attempts = []

    def fail(*arguments: Any) -> None:
        attempts.append(1)
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    table, tensor = new_table(), torch.ones(9000)
    flatten([tensor], table)
    Recorder.fault = fail
    try:
        flatten([tensor], table)
    except RuntimeError as error:
        return seen(table.launcher.dispatcher, attempts=len(attempts), error=str(error))
    finally:
        Recorder.fault = None
    return seen(table.launcher.dispatcher, attempts=len(attempts), error=None)


def repeated() -> dict[str, Any]:
    """More lists of addresses than a table keeps, which come again; and whether each launch reads its own."""
    from dpfuse_kernels.flatten import flatten
    from dpfuse_kernels.unflatten import unflatten

    table, reads = new_table(), []
    tensors = [torch.ones(9000) for _ in range(6)]

    def read(tensor: torch.Tensor) -> None:
        place = Recorder.calls[-1]["values"][1]
        reads.append(ctypes.c_int64.from_address(place).value == tensor.data_ptr())

    for number in (0, 0, 1, 2, 3, 4, 5, 0, 0):
        for _ in range(2):
            flatten([tensors[number]], table, scale=0.5)
            read(tensors[number])
        if number in (0, 3):
            unflatten(table, [tensors[number]])
            read(tensors[number])
    return seen(table.launcher.dispatcher, reads=reads, uploads=table.launcher.ring.uploads)


def unknown() -> dict[str, Any]:
    """A Triton whose CompiledKernel gives its launcher one argument more."""
    from triton.compiler import CompiledKernel

    from dpfuse_kernels.flatten import flatten

    known = CompiledKernel.__getitem__

    def other(self: Any, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments, stream: self.run(
            *grid, stream, self.function, "cluster", None, None, None, *arguments
        )

    CompiledKernel.__getitem__ = other
    table, tensor = new_table(), torch.ones(9000)
    for _ in range(3):
        flatten([tensor], table)
    CompiledKernel.__getitem__ = known
    return seen(table.launcher.dispatcher)


SCENARIOS = (
    both_ways,
    every_kernel,
    eight_bits,
    without_a_table,
    moved_table,
    listened,
    refused,
    broken,
    repeated,
    unknown,
)


def main() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    from dpfuse_kernels import launcher

    use_recorder()
    launcher.interpreting = lambda compiled: True  # the tensors are on the CPU, and nothing follows their addresses
    os.environ["DPFUSE_KERNELS"] = "triton"
    print(json.dumps({scenario.__name__: scenario() for scenario in SCENARIOS}))


if __name__ == "__main__":
    sys.exit(main())
