"""What multiplies gradients on their way where only the device knows it. Knows no collective and no order of events."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpfuse.engine.phase import Phase
from dpfuse.engine.window import WEIGHS
from dpfuse.errors import DPFuseError
from dpfuse.gradients.loss_scaling import LossScale
from dpfuse.gradients.norm import Gradients
from dpfuse.gradients.weight import GradientWeight
from dpfuse_kernels import PointerTable

if TYPE_CHECKING:
    from dpfuse.engine.reducer import Reducer
    from dpfuse.engine.report import Tail
    from dpfuse.engine.window import Canary

__all__ = ["GradientFactors"]


class GradientFactors:
    """The factors of the backward that is running, for all buckets of one wrapped model.

    While gradients are packed, they are divided by the loss scale and looked at, and multiplied with this rank's
    weight. The tail, which is packed last, tells the other ranks what was found, and the weight.

    Args:
        canary: tells them what is done here, which must be the same everywhere.
        gradient_scale: factor on each rank's gradients; None is the mean.
        rank, world_size: of the group.

    Attributes:
        factor: what packing multiplies with besides, [] float32 on the device of the gradients; None is 1.
        loss_scale: of the model.
        weight: of this rank.
    """

    def __init__(self, canary: Canary, gradient_scale: float | None, rank: int, world_size: int) -> None:
        self.factor: Tensor | None = None
        self.loss_scale = LossScale()
        self.weight = GradientWeight(rank, lambda: 0 if self._reducer is None else self._reducer.completed)
        self._weighs = False  # whether this backward does
        self._scale = 1.0  # what averaging multiplies with in this backward
        self._canary = canary
        self._gradient_scale = gradient_scale
        # Is the sum over the ranks finite wherever all summands are? That of a mean is.
        self._bounded = gradient_scale is None or abs(gradient_scale) * world_size <= 1
        self._reducer: Reducer | None = None
        self._counting = False  # whether this backward looks for values that are not finite
        self._counts: Tensor | None = None  # of them, by place in the bucket, over all buckets; int32
        self._found: Tensor | None = None  # above 0 if others were found, [] float32
        self._tail: Tail | None = None

    def attach(self, reducer: Reducer) -> None:
        """Hear of backwards from now on; a model that never asks for factors has no cost of them."""
        if self._reducer is None:
            self._reducer = reducer
            reducer.opened = self.open
            # Before anybody uses the gradients, such as an optimizer in backward.
            reducer.after_delivery = (self.delivered, *reducer.after_delivery)
            self.equip(reducer)

    def equip(self, reducer: Reducer) -> None:
        """Be asked by these buckets, if by any."""
        if self._reducer is None:
            return
        for bucket in reducer.buckets:
            bucket.factors = self
        # float16 would lose small gradients that carry no scale.
        holds = (bucket.takes_factors and bucket.averaging.dtype != "float16" for bucket in reducer.buckets)
        self._unscales = self._bounded and all(holds)
        self._slots = 1 + max(len(bucket.params) for bucket in reducer.buckets)
        self._device = torch.device(reducer.buckets[0].plan.device)
        self._counts = None  # the device may be another one
        self.loss_scale.ids = frozenset(id(param) for bucket in reducer.buckets for param in bucket.params)

    def weigh(self, weight: Any, reduction: Any) -> None:
        """Give this rank's gradients a weight in the next synchronised backward; arguments as for `GradientWeight.set`.

        Raises:
            TypeError, ValueError: as `GradientWeight.set`.
            DPFuseError: a backward is running, or these gradients cannot be weighed.
        """
        assert self._reducer is not None
        if self._reducer.phase not in (Phase.IDLE, Phase.ABANDONED):
            raise DPFuseError(
                f"set_gradient_weight() was called while a backward is {self._reducer.phase.name}, expected it before. "
                "Call it once the batch of this rank is known."
            )
        if weight is not None:
            self._refuse_weights()
        self.weight.set(weight, reduction, self._device)
        self._canary.died = False  # a weight that is given after it is that of what comes from here on

    def _refuse_weights(self) -> None:
        assert self._reducer is not None
        if self._gradient_scale is not None:
            raise DPFuseError(
                f"gradients were given a weight with gradient_scale={self._gradient_scale}, expected one of the two: "
                "weights make a mean. Leave gradient_scale out."
            )
        if not all(bucket.takes_factors for bucket in self._reducer.buckets):
            raise DPFuseError(
                "gradients were given a weight with a communication hook, expected one of the two: a hook averages as "
                "it likes. Multiply the loss instead, and divide in the hook."
            )

    def open(self, *, sync: bool, announced: bool) -> None:
        """A backward begins; arguments as for the reducer's `open`.

        Raises:
            DPFuseError: as `LossScale.begins`, or gradients with a weight cannot have one.
        """
        assert self._reducer is not None
        buckets = self._reducer.buckets
        try:
            scale = self.loss_scale.begins(lambda: Gradients(buckets, ()), announced=announced)
        except DPFuseError:
            if sync:
                self._reducer.abandon()  # peers that raise nothing wait, and hear of it from the next forward here
            raise
        if not sync:
            return
        unscales = scale is not None and self._unscales
        self.factor = self.weight.factor
        if scale is not None and unscales:
            # In float64, as torch does: some compilers' division in float32 is off by a digit.
            inverse = scale.to(self._device, torch.float64, non_blocking=True).reciprocal().float()
            self.factor = inverse if self.factor is None else self.factor * inverse
        self._counting = unscales or self.loss_scale.found is not None
        self._weighs = self.weight.value is not None and not self._canary.elsewhere
        if self._weighs:
            self._refuse_weights()  # a hook may have come since
        self._scale = buckets[0].averaging.pre_scale * buckets[0].averaging.post_scale
        handling = (1 if self.weight.reduction == "mean" else 2) + 4 * self._canary.died
        self._canary.handling = unscales + self._weighs * WEIGHS * handling
        if self._counting:
            self._begin_counts()

    def begin(self, counts: Tensor | None, slots: int) -> Tensor | None:
        """A bucket of so many slots is to be packed: where to count, if anywhere; `counts` if somebody else does."""
        if counts is not None or not self._counting:
            return counts
        assert self._counts is not None
        return self._counts[:slots]

    def settle(self, counts: Tensor | None, table: PointerTable, tail: Tail | None, source: Tensor | None) -> None:
        """It was packed.

        Args:
            counts: what `begin` has returned.
            table: the buffer.
            tail: that of the bucket, if it has one; then it is the last.
            source: what the tail has packed.
        """
        if self._counting and counts is not None:
            assert self._counts is not None
            assert self._found is not None
            if counts.data_ptr() != self._counts.data_ptr():
                self._found += counts.any()
        if tail is not None:
            assert source is not None
            if self.factor is not None:  # which is for gradients alone
                tail.write(table.views[-1], source)
            self.tell(tail, table.views[-1])

    def apply(self, tensors: list[Tensor]) -> None:
        """Multiply what is not packed, all of one dtype, and look at it."""
        if self._counting and tensors:
            assert self._found is not None
            if tensors[0].dtype in (torch.float32, torch.float64):
                factor = torch.ones_like(self._found) if self.factor is None else self.factor
                torch._amp_foreach_non_finite_check_and_unscale_(tensors, self._found, factor)
                return
            # On CUDA that is not for every dtype.
            self._found += torch.stack(torch._foreach_norm(tensors, math.inf)).isfinite().logical_not().any()
        if self.factor is not None and tensors:
            torch._foreach_mul_(tensors, self.factor)

    def tell(self, tail: Tail, packed: Tensor) -> None:
        """All is packed: write into the tail as it is to travel, [numel], what this rank has found."""
        self._tail = tail
        if self._counting:
            assert self._counts is not None
            assert self._found is not None
            tail.write_found(packed, self._found + self._counts.any())
        if self._weighs:
            assert self.weight.value is not None
            tail.write_weight(packed, self.weight.value)

    def delivered(self) -> None:
        """All gradients of a backward are averaged.

        Raises:
            DPFuseError: as `GradientWeight.hear`.
        """
        assert self._reducer is not None
        weighs, self._weighs = self._weighs, False
        if self._counting:
            assert self._tail is not None
            found = self._tail.found_somewhere()
            if self._reducer.guard is not None:  # which has spoilt them if the ranks do not agree
                found = found | self._tail.alarm()
            self.loss_scale.unscaled(found.float())
        tail, self.factor, self._counting, self._tail = self._tail, None, False, None
        self._canary.handling = 0
        if weighs:
            assert tail is not None
            Gradients(self._reducer.buckets, ()).multiply(self.weight.delivered(tail, self._scale))
        elif tail is not None and self._canary.elsewhere:  # the others may have given weights
            total = tail.weights().sum(dtype=torch.float64)
            mean = torch.where(total > 0, 1 / (total * self._scale), 1.0)
            Gradients(self._reducer.buckets, ()).multiply(mean)
        self.weight.hear(wait=self._reducer.strict)

    def _begin_counts(self) -> None:
        if self._counts is None or self._found is None:
            self._counts = torch.zeros(self._slots, dtype=torch.int32, device=self._device)
            self._found = torch.zeros((), dtype=torch.float32, device=self._device)
        else:
            self._counts.zero_()
            self._found.zero_()
