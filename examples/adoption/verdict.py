"""How the examples of this folder report: one line per check, the same verdict on every rank, an exit code."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist

__all__ = ["Verdict", "same_bits"]


class Verdict:
    """Collects checks. What fails on one rank has failed."""

    def __init__(self) -> None:
        self._failed = 0

    def check(self, what: str, fact: bool) -> None:
        """Note, and print on rank 0, whether `fact` is true on every rank. All ranks must call it."""
        flag = torch.tensor(int(fact))
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        passed = bool(flag.item())
        self._failed += not passed
        if dist.get_rank() == 0:
            print(f"{'passed' if passed else 'FAILED'}  {what}", flush=True)

    def end(self) -> None:
        """Leave the process group, and the program with code 1 if a check has failed."""
        dist.barrier()  # a launcher ends the other ranks when one fails, and rank 0 must not be cut short
        dist.destroy_process_group()
        sys.exit(1 if self._failed else 0)


def same_bits(ours: Iterable[torch.Tensor | float], theirs: Iterable[torch.Tensor | float]) -> bool:
    """Are there as many, at least one, and each equal to the last bit? Numbers count as float64."""
    pairs = list(zip(list(ours), list(theirs), strict=True))
    return bool(pairs) and all(_bytes(a) == _bytes(b) for a, b in pairs)


def _bytes(value: torch.Tensor | float) -> bytes:
    tensor = torch.as_tensor(value, dtype=None if isinstance(value, torch.Tensor) else torch.float64)
    return tensor.detach().cpu().contiguous().numpy().tobytes()
