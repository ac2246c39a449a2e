"""float32 copies of parameters in 16 bits, so that small updates are not rounded away."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Masters"]


class Masters:
    """A float32 copy of this rank's part of some parameters. The optimizer updates the copy.

    Args:
        part: of the parameters, [elements], in 16 bits.

    Attributes:
        values: the copy, [elements] float32.

    Source: Micikevicius et al., "Mixed Precision Training" (2018), section 3.1.
    """

    def __init__(self, part: Tensor) -> None:
        self._part = part
        self.values = part.float()

    @torch.no_grad()
    def follow(self) -> None:
        """Take over what a program has written into the parameters since `write`, such as a loaded state dict."""
        part = self._part
        torch.where(self.values.to(part.dtype) == part, self.values, part.float(), out=self.values)

    @torch.no_grad()
    def write(self) -> None:
        """Round the copy to the parameters."""
        self._part.copy_(self.values)
