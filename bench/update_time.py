"""Times one step of AdamW on a flat part, beside torch's fused optimizer and a copy of the same bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any
from unittest import mock

import torch

from bench.interleave import host_clock, interleave, one_thread
from bench.pack_time import CEILING, COLD_BYTES, gpu_clock
from dpfuse_kernels import adamw_step

__all__ = ["FUSED", "UPDATES", "time_updates"]

FUSED = "torch's fused AdamW"
FEWEST_SETS = 4


class _UpdateSet:
    """A gradient as it was sent, a parameter, its float32 master if it is narrow, and its averages; also for torch."""

    def __init__(self, numel: int, dtype: torch.dtype, wire: torch.dtype, device: str) -> None:
        self.grad = torch.randn(numel, device=device).to(wire)
        value = torch.randn(numel, device=device)
        self.param = value.to(dtype)
        self.master = None if dtype == torch.float32 else value.clone()
        self.exp_avg, self.exp_avg_sq = torch.zeros(2, numel, device=device)
        self._theirs = value.clone().requires_grad_()
        self._theirs.grad = torch.zeros_like(value)
        self._narrow = self.param.clone()
        self._optimizer = torch.optim.AdamW([self._theirs], fused=True)
        # Both averages and the value are read and written, the gradient is read, a narrow parameter is written.
        narrow = 0 if self.master is None else dtype.itemsize
        self.moved = numel * (6 * 4 + wire.itemsize + narrow)
        self._copied, self._copy = torch.zeros(2, self.moved // 2, dtype=torch.uint8, device=device)

    def update(self) -> None:
        adamw_step(self.grad, self.param, self.exp_avg, self.exp_avg_sq, step=1, master=self.master)

    def fuse(self) -> None:
        if self.grad.dtype == torch.float32:
            self._theirs.grad = self.grad
        else:
            assert self._theirs.grad is not None
            self._theirs.grad.copy_(self.grad)
        self._optimizer.step()
        if self.master is not None:
            self._narrow.copy_(self._theirs.detach())

    def copy(self) -> None:
        self._copy.copy_(self._copied)

    def prove(self) -> None:
        value = self.param if self.master is None else self.master
        wanted, exp_avg, exp_avg_sq = value.cpu().clone(), *torch.zeros(2, len(value))
        with mock.patch.dict(os.environ, DPFUSE_KERNELS="reference"):
            adamw_step(self.grad.cpu(), wanted, exp_avg, exp_avg_sq, step=1)
        self.update()
        self.fuse()
        for name, got, want in (
            ("the value", value, wanted),
            ("exp_avg", self.exp_avg, exp_avg),
            ("exp_avg_sq", self.exp_avg_sq, exp_avg_sq),
        ):
            assert torch.equal(got.cpu(), want), f"adamw_step: {name} differs from the reference"
        torch.testing.assert_close(self._theirs.detach(), value, rtol=1e-5, atol=1e-6)


UPDATES: dict[str, Callable[[_UpdateSet], None]] = {
    "adamw_step": _UpdateSet.update,
    FUSED: _UpdateSet.fuse,
    CEILING: _UpdateSet.copy,
}


@one_thread()
def time_updates(
    numel: int, dtype: torch.dtype, wire: torch.dtype, device: str, *, rounds: int
) -> dict[str, dict[str, Any]]:
    """Prove that the updates agree, then time them in turns, cold in the cache.

    Args:
        numel: elements of the part.
        dtype: of the parameter; one of 16 bits has a float32 master.
        wire: dtype of the gradient. torch's contender casts it first, and the master afterwards.
        device: `"cuda"`; the CPU with Triton's interpreter only shows that it runs.
        rounds: timed calls of each.

    Returns:
        By contender: `seconds`, and `bytes_per_second` of what has to be read and written at least.
    """
    torch.manual_seed(0)
    first = _UpdateSet(numel, dtype, wire, device)
    first.prove()
    sets = max(FEWEST_SETS, -(-COLD_BYTES // first.moved)) if device == "cuda" else 1
    data = [first, *(_UpdateSet(numel, dtype, wire, device) for _ in range(sets - 1))]
    for one in data:
        for run in UPDATES.values():
            run(one)
    following = cycle(data)

    def turn(name: str) -> Callable[[], tuple[float, float]]:
        clock = gpu_clock() if device == "cuda" else host_clock
        return lambda: clock(partial(UPDATES[name], next(following)))

    times = interleave({name: turn(name) for name in UPDATES}, _given, rounds=rounds)
    return {
        name: {
            "seconds": [seconds for seconds, _ in pairs],
            "bytes_per_second": first.moved / median(seconds for seconds, _ in pairs),
        }
        for name, pairs in times.items()
    }


def _given(turn: Callable[[], Any]) -> tuple[float, float]:
    # Each contender has its own clock, which has measured the time.
    first, second = turn()
    return first, second
