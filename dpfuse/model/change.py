"""A module that is no longer the one that was wrapped, as one rank sees it, and what all ranks must agree on then."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpfuse.comm import votes
from dpfuse.engine.local_part import local_of

__all__ = ["ModelChange"]

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
    """

    def __init__(self, facts: Sequence[str], new: Mapping[str, nn.Parameter], error: Exception | None = None) -> None:
        self._facts = facts
        self._new = new
        self._error = error

    def agree(self, group: dist.ProcessGroup) -> None:
        """Compare the changed modules of all ranks, and the values of what is new.

        Raises:
            DPFuseError: they differ; it is raised on every rank.
            Exception: this rank cannot train its module; the others raise a DPFuseError with its text.
        """
        if self._error is not None:
            votes.report_failure(self._error, group, WHAT)
            raise self._error
        lines = [*self._facts, *(f"parameter {name} is new, values {_digest(p)}" for name, p in self._new.items())]
        votes.agree_on_text("\n".join(lines), group, WHAT, REMEDY)


def _digest(tensor: Tensor) -> str:
    """A short hash of the values, the same for the same bits; of a DTensor, of the part of this rank."""
    data = local_of(tensor).detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return hashlib.sha256(data.numpy().data).hexdigest()[:16]
