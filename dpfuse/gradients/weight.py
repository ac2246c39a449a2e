"""How much the gradients of one rank count in the mean over the ranks. Knows no bucket and no order of events."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dpfuse.engine import messages
from dpfuse.engine.streams import capturing
from dpfuse.errors import DPFuseError

if TYPE_CHECKING:
    from dpfuse.engine.report import Tail

__all__ = ["REDUCTIONS", "GradientWeight"]

REDUCTIONS = ("mean", "sum")  # of the loss over what the weight counts


class _Told(NamedTuple):
    """The weights of a backward, which nobody has looked at yet."""

    step: int
    values: Tensor  # [ranks] float32, on the CPU, which holds them once `ready` has passed
    ready: torch.cuda.Event | None


class GradientWeight:
    """The weight of this rank's gradients in the next synchronised backward, if it has one.

    Gradients of losses that are means are multiplied with it while they are packed; those of sums are its multiple by
    themselves. The tail brings the weights of all ranks, and what has landed is divided by their sum.

    Args:
        rank: of this process.
        step: the number of the last synchronised backward.

    Attributes:
        value: the weight, [] float32 on the device of the gradients.
        reduction: one of `REDUCTIONS`.
    """

    def __init__(self, rank: int, step: Callable[[], int]) -> None:
        self.value: Tensor | None = None
        self.reduction = "mean"
        self._rank = rank
        self._step = step
        self._told: list[_Told] = []

    def set(self, weight: Any, reduction: Any, device: torch.device) -> None:
        """Use this weight, a number or a tensor with one, in the next synchronised backward; None uses none.

        Raises:
            TypeError, ValueError: an argument that is no such thing.
        """
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be 'mean' or 'sum', as that of the loss, got {reduction!r}")
        if isinstance(weight, Tensor) and weight.numel() == 1 and not weight.is_complex():
            if weight.device == device:
                self.value, self.reduction = weight.detach().reshape(()).to(torch.float32, copy=True), reduction
                return
            weight = weight.item()
        if weight is None:
            self.value = None
            return
        if isinstance(weight, bool) or not isinstance(weight, Real):
            raise TypeError(
                f"weight must be a number or a tensor with one, got {weight!r} of type {type(weight).__name__}; None "
                "takes one back"
            )
        if not 0 <= float(weight) < math.inf:
            raise ValueError(f"weight must be finite, and 0 or more, got {weight}; 0 leaves this rank out")
        # Filled, not uploaded: for that the host would wait.
        self.value = torch.full((), float(weight), dtype=torch.float32, device=device)
        self.reduction = reduction

    @property
    def factor(self) -> Tensor | None:
        """What gradients are multiplied with while they are packed, [] float32; None is 1."""
        return self.value if self.reduction == "mean" else None

    def delivered(self, tail: Tail, scale: float) -> Tensor:
        """The gradients of a backward that had weights have landed.

        Args:
            tail: has the weights of all ranks.
            scale: what gradients were multiplied with on their way, besides the weight.

        Returns:
            What is left to multiply them with, [] float64 on their device; NaN where the weights give no mean.
        """
        weights = tail.weights()
        self.value = None
        if not weights.is_cuda:
            self._told.append(_Told(self._step(), weights, None))
        elif not capturing():
            copy = torch.empty(weights.shape, dtype=weights.dtype, pin_memory=True).copy_(weights, non_blocking=True)
            self._told.append(_Told(self._step(), copy, torch.cuda.current_stream(weights.device).record_event()))
        total = weights.sum(dtype=torch.float64)
        # Not the sum alone: a weight below zero may hide in it.
        is_mean = (total > 0) & ((weights >= 0) & weights.isfinite()).all()
        return torch.where(is_mean, 1 / (total * scale), math.nan)

    def hear(self, *, wait: bool) -> None:
        """At the end of a backward: have the weights given no mean? From a GPU they come a backward later.

        Args:
            wait: ask for them at once.

        Raises:
            DPFuseError: they have not; on all ranks alike.
        """
        if not self._told or capturing():
            return
        told_before, self._told = self._told, []
        for told in told_before:
            if told.ready is not None and told.step == self._step() and not wait:
                self._told.append(told)
                continue
            if told.ready is not None:
                told.ready.synchronize()  # it has passed, or the device is a step behind
            values = told.values.tolist()
            if not (all(0 <= value < math.inf for value in values) and sum(values) > 0):
                raise DPFuseError(messages.weightless(self._rank, told.step, values))
