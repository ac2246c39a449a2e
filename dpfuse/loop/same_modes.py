"""The rule of DPF-L08: ranks differ in the training flag of the model, or in the dtype of autocast."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from dpfuse.findings import OTHER_MODES, findings
from dpfuse.loop.compared_words import Sums, Word
from dpfuse.loop.record import Record

__all__ = ["SameModes"]

BACKWARDS = 2  # running
TRAIN = "call train() and eval() on all ranks, train() also after an evaluation on one of them"
AUTOCAST = "enter autocast with the same dtype"
# Each word that is compared: what a rank does that has set it, and what to do.
MODES = {
    "training": ("in training mode", TRAIN),
    "float16": ("under autocast with float16", AUTOCAST),
    "bfloat16": ("under autocast with bfloat16", AUTOCAST),
}


class SameModes:
    """Notes in which mode the forwards run, and compares that of the last one before a backward.

    Args:
        module: that is wrapped.
        device: of its parameters, such as "cpu".
        record: of the model whose gradients are averaged.
    """

    def __init__(self, module: nn.Module, device: str, record: Record) -> None:
        self._module = module
        self._device = device
        self._record = record
        self._mode = (False, False, False)
        self._backwards = 0
        self._text = ""

    def forward_begins(self) -> None:
        """Note the mode."""
        dtype = torch.get_autocast_dtype(self._device) if torch.is_autocast_enabled(self._device) else None
        self._mode = self._module.training, dtype is torch.float16, dtype is torch.bfloat16

    def words(self) -> Mapping[str, Word]:
        """Return what is compared."""
        return {name: [float(bit)] for name, bit in zip(MODES, self._mode, strict=True)}

    def heard(self, sums: Sums) -> None:
        """Take what the ranks have sent."""
        other = [name for name in MODES if not sums.same(name)]
        self._backwards = self._backwards + 1 if other else 0
        if self._backwards >= BACKWARDS:
            ran = [
                f"{round(sums.total(name))} of {sums.size} {MODES[name][0]}, "
                f"this rank {'among them' if any(sums.own(name)) else 'not'}"
                for name in other
            ]
            do = " and ".join(dict.fromkeys(MODES[name][1] for name in other))
            self._text = (
                f"rank {self._record.rank}: in {BACKWARDS} backwards running, the ranks had run their forwards in "
                f"different modes: {'; '.join(ran)}. Expected the same on every rank: {do}."
            )

    def tell(self) -> None:
        """Say what was found."""
        if self._text:
            findings.tell(OTHER_MODES, self._text, self._record.level)
            self._text = ""
