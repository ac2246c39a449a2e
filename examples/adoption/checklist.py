"""Reports the checks of the examples in this folder: one line per check, and an exit code, equal on every rank."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist

__all__ = ["Checklist", "same_bits", "state_of"]


class Checklist:
    """Collects checks. A check that fails on one rank has failed."""

    def __init__(self) -> None:
        self._failed = 0

    def check(self, what: str, fact: bool) -> None:
        """Record whether `fact` is true on every rank, and print it on rank 0. All ranks must call it."""
        flag = torch.tensor(int(fact))
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        passed = bool(flag.item())
        self._failed += not passed
        if dist.get_rank() == 0:
            print(f"{'passed' if passed else 'FAILED'}  {what}", flush=True)

    def end(self) -> None:
        """Leave the process group, and the program with code 1 if a check has failed."""
        dist.barrier()  # a launcher ends all ranks when one fails, but rank 0 must finish its report
        dist.destroy_process_group()
        sys.exit(1 if self._failed else 0)


def same_bits(ours: Iterable[torch.Tensor | float], theirs: Iterable[torch.Tensor | float]) -> bool:
    """Whether both have the same number of values, at least one, with equal bits. Numbers count as float64."""
    pairs = list(zip(list(ours), list(theirs), strict=True))
    return bool(pairs) and all(_bytes(a) == _bytes(b) for a, b in pairs)


def state_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a module, with the buffers of rank 0. All ranks must call it.

    dpfuse sends buffers when a backward ends, torch's DDP before the next forward. So after the last step, the buffers
    of other ranks than 0 differ.
    """
    buffers = [buffer.detach().clone() for buffer in module.buffers()]
    for buffer in buffers:
        dist.broadcast(buffer, 0)
    return [*(param.detach() for param in module.parameters()), *buffers]


def _bytes(value: torch.Tensor | float) -> bytes:
    tensor = torch.as_tensor(value, dtype=None if isinstance(value, torch.Tensor) else torch.float64)
    return tensor.detach().cpu().contiguous().numpy().tobytes()
