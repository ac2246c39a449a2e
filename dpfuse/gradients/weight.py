"""How much the gradients of one rank count in the mean over the ranks. Knows no bucket and no order of events."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.comm import collective
from dpfuse.engine import messages
from dpfuse.engine.report import Report
from dpfuse.engine.report_layout import ReportLayout, ReportPlace
from dpfuse.engine.streams import HostCopy, capturing
from dpfuse.engine.sync_decision import Window
from dpfuse.errors import DPFuseError

__all__ = ["REDUCTIONS", "GradientWeight"]

REDUCTIONS = ("mean", "sum")  # of the loss over what the weight counts


class _Told(NamedTuple):
    """What the weights of a backward came to, which nothing has looked at yet."""

    step: int
    values: HostCopy  # their sum, the number of bad ones, the number of ranks with one
    weight: float  # of this rank, where it can be gathered


class GradientWeight:
    """The weight of this rank's gradients in the next synchronised backward, if it has one.

    Gradients of losses that are means are multiplied with it while they are packed; those of sums are its multiple by
    themselves. The report adds up the weights of all ranks, and what has landed is divided by their sum.

    Args:
        group: the ranks.
        step: the number of the last synchronised backward.
        window: knows whether this rank has inputs.

    Attributes:
        value: the weight, [] float32 on the device of the gradients.
        reduction: one of `REDUCTIONS`.
    """

    _place: ReportPlace

    def __init__(self, group: dist.ProcessGroup, step: Callable[[], int], window: Window) -> None:
        self.value: Tensor | None = None
        self.reduction = "mean"
        self._group = group
        self._step = step
        self._window = window
        self._weighs = False  # whether the backward that is running does
        self._scale = 1.0  # what averaging multiplies with in it
        self._told: list[_Told] = []

    def register(self, layout: ReportLayout) -> None:
        """As `Feature.register`."""
        self._place = layout.register("gradient weight", {"weight": 1, "bad": 1, "weighing": 1})

    def sums(self, report: Report) -> Tensor:
        """Return the sum of all weights, the number of bad ones, and the number of ranks with one, [3] float64."""
        return report.sums(self._place).double()

    @staticmethod
    def checked(weight: Any, reduction: Any, device: torch.device) -> Tensor | None:
        """A weight, a number or a tensor with one, as [] float32 on `device`; None is none.

        Raises:
            TypeError, ValueError: an argument that is no such thing.
        """
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}; pass that of the loss")
        if isinstance(weight, Tensor) and weight.numel() == 1 and not weight.is_complex():
            if weight.device == device:
                return weight.detach().reshape(()).to(torch.float32, copy=True)
            weight = weight.item()
        if weight is None:
            return None
        if isinstance(weight, bool) or not isinstance(weight, Real):
            raise TypeError(
                f"weight must be a number or a tensor with one, got {weight!r} of type {type(weight).__name__}; None "
                "takes one back"
            )
        if not 0 <= float(weight) < math.inf:
            raise ValueError(f"weight must be finite, and 0 or more, got {weight}; 0 leaves this rank out")
        # Filled, not uploaded: for that the host would wait.
        return torch.full((), float(weight), dtype=torch.float32, device=device)

    def set(self, weight: Any, reduction: Any, device: torch.device) -> None:
        """Use this weight in the next synchronised backward; arguments and errors are those of `checked`."""
        self.value = self.checked(weight, reduction, device)
        if self.value is not None:
            self.reduction = reduction

    @property
    def factor(self) -> Tensor | None:
        """What gradients are multiplied with while they are packed, [] float32; None is 1."""
        return self.value if self.reduction == "mean" else None

    @property
    def in_use(self) -> Tensor | None:
        """The weight in the backward that is running, [] float32; None if it has none."""
        return self.value if self._weighs else None

    def begins(self, scale: float) -> bool:
        """A synchronised backward begins, which multiplies with `scale` for the mean; does this rank weigh it?"""
        self._scale = scale
        self._weighs = self.value is not None and not self._window.without_inputs
        return self._weighs

    def tell(self, report: Report, packed: Tensor) -> None:
        """Write into the report, as it is packed, what this rank has."""
        if self._weighs:
            assert self.value is not None
            good = (self.value >= 0) & self.value.isfinite()
            told = torch.where(good, self.value, 0.0), good.logical_not().float(), torch.ones_like(self.value)
            report.write(packed, self._place, torch.stack(told))

    def delivered(self, report: Report) -> Tensor | None:
        """The gradients of a backward have landed, with the report.

        Returns:
            What is left to multiply them with, [] float64 on their device, or None for nothing; NaN where the weights
            give no mean.
        """
        weighs, self._weighs = self._weighs, False
        if not weighs and not self._window.without_inputs:
            return None
        values = self.sums(report)
        total, bad, weighing = values
        if not values.is_cuda:
            own = 0.0 if self.value is None or self._window.without_inputs else self.value.item()
            self._told.append(_Told(self._step(), HostCopy(values), own))
        elif not capturing() and weighs:
            self._told.append(_Told(self._step(), HostCopy(values), 0.0))
        if weighs:
            self.value = None
        mean = torch.where((total > 0) & (bad == 0), 1 / (total * self._scale), math.nan)
        return torch.where(weighing > 0, mean, 1.0)

    def hear(self, *, wait: bool = False) -> None:
        """At the end of a backward, raise if the weights gave no mean. From a GPU they come one backward later.

        Args:
            wait: ask for them at once.

        Raises:
            DPFuseError: they gave none; on every rank.
        """
        if not self._told or capturing():
            return
        told_before, self._told = self._told, []
        for told in told_before:
            if told.values.late and told.step == self._step() and not wait:
                self._told.append(told)
                continue
            total, bad, weighing = told.values.read()  # they have arrived, or the device is a step behind
            if weighing and not (0 < total < math.inf and not bad):
                raise DPFuseError(messages.weightless(self._group.rank(), told.step, self._gathered(told)))

    def _gathered(self, told: _Told) -> list[float]:
        """The weights of all ranks; none from a GPU, where ranks do not hear of it at the same time."""
        if told.values.late:
            return []
        row = torch.tensor([told.weight], dtype=torch.float64, device=collective.group_device(self._group))
        return [float(other.item()) for other in collective.all_gather(row, self._group)]
