"""Whether the program has scaled or cut a gradient: judged by a few of its elements before and after. Knows no step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfuse.engine.gradient_change import Change, change_of
from dpfuse.trace.tensor_hash import inner_tensors

__all__ = ["Pair", "is_plain", "rescaled", "sample_of"]

ELEMENTS = 64  # of a tensor


@dataclass(frozen=True)
class Pair:
    """Elements of the gradient of one parameter at two times, [n].

    Args:
        place: of the parameter.
        before, now: the elements.
    """

    place: int
    before: Tensor
    now: Tensor


def is_plain(tensor: Tensor) -> bool:
    """Whether it is dense, and its elements are here."""
    unusual = tensor.is_nested or tensor.is_meta or tensor.layout is not torch.strided
    return not unusual and inner_tensors(tensor) is None


def sample_of(tensor: Tensor) -> Tensor:
    """Return a copy of some elements, at most 64. The host does not wait for the device.

    Args:
        tensor: plain, as `is_plain` says.
    """
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // ELEMENTS)][:ELEMENTS].clone()


def rescaled(pairs: Sequence[Pair]) -> list[int]:
    """Return the places of the gradients that were scaled or cut between the two times. Waits for the device.

    An addition gives the same after each batch as at the end, and so does a mask.
    """
    return [pair.place for pair in pairs if change_of(pair.before.cpu(), pair.now.cpu()) is Change.RESCALED]
