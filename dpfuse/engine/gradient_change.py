"""What a program has done to a gradient, as far as some of its elements before and after tell. Knows no step."""

from __future__ import annotations

from enum import Enum, auto

import torch
from torch import Tensor

__all__ = ["Change", "change_of"]

FEW = 3  # different sizes, of which fewer fit nearly everything
ROUNDED = 2  # units of the last place: unscaling, then clipping


class Change(Enum):
    """What has become of the values of a gradient."""

    KEPT = auto()  # within rounding; some may be zeros now, as under a mask, and the largest one may be smaller
    RESCALED = auto()  # multiplied by one number, cut at one absolute value, or both; some may be zeros now
    OTHER = auto()  # such as an average over ranks or noise; also where the values cannot tell


def change_of(before: Tensor, now: Tensor) -> Change:
    """Return what has become of these values, [n], on the CPU.

    Values that were cut are of one size, which is the largest one now. All others show the factor. Zeros show nothing.

    Example:
        >>> import torch
        >>> from dpfuse.engine.gradient_change import change_of
        >>> before = torch.tensor([1.0, -2.0, 4.0, 3.0])
        >>> [change_of(before, now).name for now in (before, (before / 2).clamp(-1.2, 1.2), (before + 1) / 2)]
        ['KEPT', 'RESCALED', 'OTHER']
    """
    if before.shape != now.shape or before.dtype is not now.dtype:
        return Change.OTHER
    if torch.equal(before, now):
        return Change.KEPT
    kind = torch.finfo(now.dtype)
    before, now = _numbers(before), _numbers(now)
    left = now != 0
    before, now = before[left], now[left]
    sizes, new_sizes = before.abs(), now.abs()
    if len(sizes.unique()) < FEW or not new_sizes.isfinite().all() or not torch.equal(before.sign(), now.sign()):
        return Change.OTHER
    below = new_sizes < new_sizes.max()
    # Each value below allows a range of factors. A product that is too small for the dtype is rounded more.
    rounding = ROUNDED * kind.eps * new_sizes + kind.tiny * kind.eps
    lowest = ((new_sizes - rounding) / sizes).where(below, 0.0).max()
    highest = ((new_sizes + rounding) / sizes).where(below, torch.inf).min()
    if lowest > highest or (highest * sizes < new_sizes - rounding)[~below].any():
        return Change.OTHER
    changed = int(((new_sizes - sizes).abs() > rounding).sum())
    return Change.RESCALED if changed > 1 else Change.KEPT


def _numbers(values: Tensor) -> Tensor:
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj()).flatten()
    return values.double()
