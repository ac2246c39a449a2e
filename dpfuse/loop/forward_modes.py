"""What DPF-L08 is asked about: in which modes the ranks have run their forwards."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from dpfuse.loop.compared_words import Sums, Word
from dpfuse.rules.l08_other_modes import MODES, note

__all__ = ["ForwardModes"]


class ForwardModes:
    """Notes in which mode the forwards run, and compares that of the last one before a backward.

    Args:
        module: that is wrapped.
        device: of its parameters, such as "cpu".
        rank: of this process.
    """

    def __init__(self, module: nn.Module, device: str, rank: int) -> None:
        self._module = module
        self._device = device
        self._rank = rank
        self._mode = (0.0, 0.0, 0.0)
        self._backwards = 0  # running, that the rule remembers

    def forward_begins(self) -> None:
        """Note the mode."""
        dtype = torch.get_autocast_dtype(self._device) if torch.is_autocast_enabled(self._device) else None
        self._mode = float(self._module.training), float(dtype is torch.float16), float(dtype is torch.bfloat16)

    def words(self) -> Mapping[str, Word]:
        """Return what is compared."""
        return {name: [bit] for name, bit in zip(MODES, self._mode, strict=True)}

    def heard(self, sums: Sums) -> str | None:
        """Return what is said of what the ranks have sent."""
        modes = dict(zip(MODES, map(sums.bit, MODES), strict=True))
        self._backwards, text = note(self._backwards, self._rank, sums.size, modes)
        return text
