"""A module that is no longer the one that was wrapped, as one rank sees it, and what all ranks must agree on then."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpfuse.comm import votes
from dpfuse.engine.plan import BucketPlan

__all__ = ["ModelChange"]

WHAT = "the module, which was changed after it was wrapped,"
REMEDY = (
    "Make the same change on every rank, with the same values: build what is new under one seed, load it from one "
    "checkpoint, or broadcast it."
)


class ModelChange:
    """What has to be agreed on before gradients of the changed module can be averaged.

    Args:
        text: the change, in words.
        plan: that of the changed module, or the error because of which there is none.
        facts: one line per parameter and buffer, without values.
        new: the parameters whose values the ranks have never compared, by name.
    """

    def __init__(
        self, text: str, plan: BucketPlan | Exception, facts: list[str], new: Mapping[str, nn.Parameter]
    ) -> None:
        self.text = text
        self.plan = plan
        self._facts = facts
        self._new = new

    def agree(self, group: dist.ProcessGroup) -> BucketPlan:
        """The plan, once all ranks have found their changed modules, and the values of what is new, to be the same.

        Raises:
            DPFuseError: they are not; it is raised on every rank.
            Exception: there is no plan on this rank; the others raise a DPFuseError with its text.
        """
        if isinstance(self.plan, Exception):
            votes.report_failure(self.plan, group, WHAT)
            raise self.plan
        lines = [*self._facts, *(f"parameter {name} is new, values {_digest(p)}" for name, p in self._new.items())]
        votes.agree_on_text("\n".join(lines), group, WHAT, REMEDY)
        return self.plan


def _digest(tensor: Tensor) -> str:
    """A short hash of the values, the same for the same bits."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return hashlib.sha256(data.numpy().data).hexdigest()[:16]
