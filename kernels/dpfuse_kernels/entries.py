"""The tensors of one call, after the checks. Knows no table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dpfuse_kernels.layout import Slot

__all__ = ["Entries"]


@dataclass(slots=True, eq=False)
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
    _dense: dict[int, Tensor] = field(default_factory=dict, init=False)

    def make_dense(self, slots: Sequence[Slot], *, read: bool) -> None:
        """Let `addresses` name memory in the order of the slot in the place of each irregular tensor.

        This object keeps that memory. Memory that is freed after a launch is reused after it, on the same stream.

        Args:
            slots: of all tensors.
            read: whether the tensors are copied there.
        """
        for index, tensor in self.irregular.items():
            with torch.no_grad():
                dense = slots[index].empty_like(tensor)
                if read:
                    dense.copy_(tensor)
            self.addresses[index] = dense.data_ptr()
            self._dense[index] = dense

    def write_back(self) -> None:
        """Copy what a kernel has written to that memory to the irregular tensors."""
        for index, dense in self._dense.items():
            with torch.no_grad():
                self.irregular[index].copy_(dense)
