"""A module that is no longer the one that was wrapped, as one rank sees it, and what all ranks must agree on then."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpfuse.comm import votes
from dpfuse.comm.memory_errors import error_of
from dpfuse.engine.local_part import local_of

__all__ = ["ModelChange", "decline"]

WHAT = "the module, which was changed after it was wrapped,"
REMEDY = (
    "Make the same change on every rank, with the same values: build what is new under one seed, load it from one "
    "checkpoint, or broadcast it."
)


class ModelChange:
    """What has to be agreed on before gradients of the changed module can be averaged.

    Args:
        facts: one line per parameter and buffer, without values.
        new: the parameters whose values the ranks have never compared, by name.
        error: why this rank cannot train the changed module, if that is so.

    Attributes:
        error: as given, or why the changed module cannot be described.
    """

    def __init__(self, facts: Sequence[str], new: Mapping[str, nn.Parameter], error: Exception | None = None) -> None:
        self._facts = facts
        self._new = new
        self.error = error

    def agree(self, group: dist.ProcessGroup) -> None:
        """Compare the changed modules of all ranks, and the values of what is new.

        Raises:
            DPFuseError: they differ; it is raised on every rank.
            Exception: this rank cannot train its module; the others raise a DPFuseError with its text.
        """
        lines = [*self._facts]
        if self.error is None:
            try:
                lines += [f"parameter {name} is new, values {_digest(param)}" for name, param in self._new.items()]
            except Exception as error:
                self.error = error
        if self.error is not None:
            votes.report_failure(self.error, group, WHAT)
            raise self.error
        votes.agree_on_text("\n".join(lines), group, WHAT, REMEDY)


def decline(group: dist.ProcessGroup, *, out_of_memory: bool) -> bool:
    """Take part in `ModelChange.agree` of the peers on a rank whose backward has failed: they raise a DPFuseError."""
    votes.report_failure(error_of("its backward was interrupted", out_of_memory=out_of_memory), group, WHAT)
    return True


def _digest(tensor: Tensor) -> str:
    """A short hash of the values, the same for the same bits; of a DTensor, of the part of this rank."""
    data = local_of(tensor).detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    # 64 bits: values are compared only once, so values that differ under one hash would never be noticed.
    return hashlib.sha256(data.numpy().data).hexdigest()[:16]
