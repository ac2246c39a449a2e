"""Parameters whose weights may differ between ranks, as the user of a wrapper has said."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["are_left_alone", "leave_alone"]

_left_alone = WeakTensorKeyDictionary()


def leave_alone(params: Iterable[Tensor]) -> None:
    """Note parameters of a wrapper that compares no weights. Keeps none of them alive."""
    for param in params:
        _left_alone[param] = None


def are_left_alone(params: Iterable[Tensor]) -> bool:
    """Whether one of these belongs to such a wrapper."""
    return any(param in _left_alone for param in params)
