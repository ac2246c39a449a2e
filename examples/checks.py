"""Bitwise comparisons, between ranks and between two trainings. Ranks exchange digests, never objects."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist

__all__ = ["equal_everywhere", "first_difference", "same_bits", "true_everywhere"]


def equal_everywhere(tensors: Iterable[torch.Tensor], device: torch.device) -> bool:
    """Whether all ranks have the same bytes in `tensors`. All ranks must call it, and get the same answer.

    Args:
        tensors: the tensors, in the same order on every rank.
        device: a device from which the process group can send.
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(_bytes(tensor).cpu().numpy().tobytes())
    mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8).to(device)  # [32]
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(torch.equal(mine, other) for other in everyone)


def true_everywhere(fact: bool, device: torch.device) -> bool:
    """Whether `fact` is true on every rank. All ranks must call it, and get the same answer."""
    flag = torch.tensor(int(fact), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether all bits are equal. Unlike with `==`, NaN equals NaN, and 0.0 differs from -0.0."""
    return ours.dtype == theirs.dtype and torch.equal(_bytes(ours), _bytes(theirs))


def first_difference(ours: torch.Tensor, theirs: torch.Tensor) -> int | None:
    """Return the first index at which two lists of numbers differ in a bit; None if they are equal."""
    if same_bits(ours, theirs):
        return None
    return next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not same_bits(a[None], b[None]))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)
