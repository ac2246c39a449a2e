"""Times the pack kernel in several shapes, and a launch in both ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, product
from statistics import median
from typing import Any, NamedTuple

import torch

from bench.baselines import SCALE
from bench.interleave import host_clock, interleave, one_thread
from bench.pack_time import CEILING, COLD_BYTES, gpu_clock
from dpfuse_kernels import PointerTable, Slot
from dpfuse_kernels.flatten import flatten, flatten_reference
from dpfuse_kernels.launch_shape import LaunchShape, launch_shape
from dpfuse_kernels.launcher import Launcher

__all__ = ["CALLS", "LAUNCHES", "SHAPES", "label", "time_launches", "time_shapes"]

SHAPES = [LaunchShape(chunk, warps) for chunk, warps in [(1024, 2), *product((2048, 4096, 8192), (4, 8, 16))]]
FEWEST_SETS = 4
LAUNCHES = ("bound", "kernel[grid]")
CALLS = 100  # launches that are timed together: one launch is too short for a clock


def label(shape: LaunchShape) -> str:
    """Return the name of the shape in a record."""
    return f"{shape.chunk} elements, {shape.warps} warps"


class _PackSet:
    """Tensors, their buffer, and one launcher per shape."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, wire: torch.dtype, device: str) -> None:
        self.sources = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
        step = 16 // min(dtype.itemsize, wire.itemsize)
        slots, offset = [], 0
        for index, source in enumerate(self.sources):
            slots.append(Slot(str(index), offset, tuple(source.shape), source.stride()))
            offset += -(-source.numel() // step) * step
        self.table = PointerTable(torch.zeros(offset, dtype=wire, device=device), slots, dtype)
        self.twin = torch.randn(offset, device=device).to(dtype)
        self._launchers = {shape: Launcher(self.table, shape) for shape in SHAPES}

    def pack(self, shape: LaunchShape) -> None:
        self.table.launcher = self._launchers[shape]
        flatten(self.sources, self.table, scale=SCALE)

    def copy(self) -> None:
        self.table.flat.copy_(self.twin)

    def prove(self, shape: LaunchShape) -> None:
        self.table.flat.zero_()
        flatten_reference(self.sources, self.table, scale=SCALE)
        expected = self.table.flat.clone()
        self.table.flat.zero_()
        self.pack(shape)
        assert torch.equal(self.table.flat, expected), f"{shape}: a tensor differs"


class _Call(NamedTuple):
    run: Callable[[_PackSet], None]
    shape: LaunchShape | None


@one_thread()
def time_shapes(
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    wire: torch.dtype,
    device: str,
    *,
    rounds: int,
    hot: bool,
) -> dict[str, dict[str, Any]]:
    """Prove that every shape packs the same, then time them in turns, together with a plain `copy_`.

    Args:
        shapes: of the tensors.
        dtype: of the tensors.
        wire: of the buffer.
        device: `"cuda"`; the CPU with Triton's interpreter only shows that it runs.
        rounds: timed packs per shape.
        hot: whether all packs use the same memory, which may be in the cache.

    Returns:
        By shape, and for the copy: `seconds`, `host`, `bytes` of the tensors, `bytes_per_second` read and written,
        and whether the shape is the `default`.
    """
    torch.manual_seed(0)
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    nbytes, moved = numel * dtype.itemsize, numel * (dtype.itemsize + wire.itemsize)
    sets = 1 if hot else max(FEWEST_SETS, -(-COLD_BYTES // moved))
    data = [_PackSet(shapes, dtype, wire, device) for _ in range(sets)]
    calls = {label(shape): _Call(partial(_PackSet.pack, shape=shape), shape) for shape in SHAPES}
    calls[CEILING] = _Call(_PackSet.copy, None)
    for call in calls.values():
        if call.shape is not None and not (device == "cpu" and wire == torch.bfloat16):
            data[0].prove(call.shape)  # the interpreter truncates float32 to bfloat16, a GPU rounds
        for one in data:
            call.run(one)
    following = cycle(data)

    def turn(name: str) -> Callable[[], tuple[float, float]]:
        clock = gpu_clock() if device == "cuda" else host_clock
        return lambda: clock(partial(calls[name].run, next(following)))

    times = interleave({name: turn(name) for name in calls}, _given, rounds=rounds)
    usual = launch_shape(numel / len(shapes))
    return {
        name: {
            "seconds": [seconds for seconds, _ in pairs],
            "host": median(wall for _, wall in pairs),
            "bytes": nbytes,
            "bytes_per_second": moved / median(seconds for seconds, _ in pairs),
            "default": calls[name].shape == usual,
        }
        for name, pairs in times.items()
    }


@one_thread()
def time_launches(device: str, *, rounds: int, calls: int = CALLS) -> dict[str, dict[str, Any]]:
    """Time launches of the pack kernel in both ways, in CPU seconds of this thread.

    Args:
        device: `"cuda"`; the CPU with Triton's interpreter only shows that it runs.
        rounds: number of timed groups of launches.
        calls: launches per group.

    Returns:
        By way: `seconds` per launch, `launches`, and the number of launches without the dispatcher.
    """
    data = {name: _PackSet([(1024,)], torch.float32, torch.float32, device) for name in LAUNCHES}
    data["kernel[grid]"].table.launcher.dispatcher.binds = False

    def step(name: str) -> None:
        one = data[name]
        for _ in range(calls):
            flatten(one.sources, one.table, scale=SCALE)

    def clock(run: Callable[[], object]) -> tuple[float, float]:
        if device == "cuda":
            torch.cuda.synchronize()  # else a full queue would make the host wait
        cpu, wall = host_clock(run)
        return cpu / calls, wall / calls

    times = interleave({name: partial(step, name) for name in LAUNCHES}, clock, rounds=rounds)
    return {
        name: {
            "seconds": [seconds for seconds, _ in pairs],
            "launches": data[name].table.launcher.dispatcher.launches,
            "bound": data[name].table.launcher.dispatcher.bound_launches,
        }
        for name, pairs in times.items()
    }


def _given(turn: Callable[[], Any]) -> tuple[float, float]:
    # Each contender has its own clock, which has measured the time.
    first, second = turn()
    return first, second
