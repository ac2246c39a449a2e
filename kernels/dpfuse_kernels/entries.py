"""The tensors of one call, after the checks. Knows no table."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["Entries"]


@dataclass(frozen=True)
class Entries:
    """The tensors of one call, after the checks.

    Attributes:
        addresses: per slot, the tensor's address in bytes; 0 for None and for an empty tensor.
        missing: indices of the tensors that are None.
        own: indices of the tensors that are their slots, by address and strides; None if all of them are.
        irregular: by index, the tensors with another memory order than their slot. `check_cheaply` does not look for
            them.
    """

    addresses: list[int]
    missing: tuple[int, ...] = ()
    own: tuple[int, ...] | None = ()
    irregular: dict[int, Tensor] = field(default_factory=dict)
