"""Whether the program has scaled or cut a gradient: judged by a few of its elements before and after. Knows no step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfuse.trace.tensor_hash import inner_tensors

__all__ = ["Pair", "is_plain", "is_rescaled", "rescaled", "sample_of"]

ELEMENTS = 64  # of a tensor
TINY = 1e-30  # below which a product may have been rounded to nothing


@dataclass(frozen=True)
class Pair:
    """Elements of the gradient of one parameter at two times, [n] float64.

    Args:
        place: of the parameter.
        before, now: the elements.
        tolerance: how far, relatively, a multiplication of numbers of its dtype may round.
    """

    place: int
    before: Tensor
    now: Tensor
    tolerance: float


def is_plain(tensor: Tensor) -> bool:
    """Whether it is dense, and its elements are here."""
    unusual = tensor.is_nested or tensor.is_meta or tensor.layout is not torch.strided
    return not unusual and inner_tensors(tensor) is None


def sample_of(tensor: Tensor) -> Tensor:
    """Return a copy of some elements, at most 64, as float64. The host does not wait for the device.

    Args:
        tensor: plain, as `is_plain` says.
    """
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1)
    return flat[:: max(1, flat.numel() // ELEMENTS)][:ELEMENTS].to(torch.float64, copy=True)


def rescaled(pairs: Sequence[Pair]) -> list[int]:
    """Return the places of the gradients that were scaled or cut between the two times. Waits for the device."""
    found = []
    for pair in pairs:
        before, now = pair.before.cpu(), pair.now.cpu()
        if len(before) == len(now) and not torch.equal(before, now) and is_rescaled(before, now, pair.tolerance):
            found.append(pair.place)
    return found


def is_rescaled(before: Tensor, now: Tensor, tolerance: float) -> bool:
    """Whether values were multiplied by one number, cut at one absolute value, or both, in this order.

    An addition gives the same after each batch as at the end, and so does a mask. So zeros are left out.

    Args:
        before, now: [n] float64, on the CPU.
        tolerance: of the factor, relative.

    Example:
        >>> import torch
        >>> from dpfuse.trace.rescaling import is_rescaled
        >>> before = torch.tensor([1.0, -2.0, 4.0, 3.0], dtype=torch.float64)
        >>> [is_rescaled(before, now, 1e-6) for now in (before / 3, (before / 2).clamp(-1.2, 1.2), before + 1, before)]
        [True, True, False, False]
    """
    kept = now != 0
    before, now = before[kept], now[kept]
    sizes, new_sizes = before.abs(), now.abs()
    if len(sizes.unique()) < 3 or not new_sizes.isfinite().all() or not torch.equal(before.sign(), now.sign()):
        return False
    below = new_sizes < new_sizes.max()
    factor = 1.0
    if len(new_sizes[below].unique()) > 1:  # of one value nothing is known but whether it was kept
        place = int(new_sizes.where(below, 0).argmax())
        factor = float(now[place] / before[place])
    scaled = factor * sizes
    fits = torch.where(
        below, (new_sizes - scaled).abs() <= tolerance * scaled + TINY, new_sizes <= scaled * (1 + tolerance)
    )
    shrunk = new_sizes < sizes * (1 - 2 * tolerance)
    return bool(fits.all()) and (abs(factor - 1) > 2 * tolerance or int(shrunk.sum()) > 1)
