"""What multiplies gradients while they are packed, besides averaging: the loss scale undone, and this rank's weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.engine.autograd import averaged_elsewhere
from dpfuse.engine.backward_table import ABANDONED, IDLE
from dpfuse.engine.bucket import GradBucket
from dpfuse.engine.comm_buffer import CommBuffer
from dpfuse.engine.feature import Engine, Feature
from dpfuse.engine.plan import Bucket
from dpfuse.engine.protocols import PackArguments, PackStep
from dpfuse.engine.report import Report
from dpfuse.engine.report_layout import Field, ReportPlace
from dpfuse.engine.shared_params import shared
from dpfuse.engine.sync_decision import Window
from dpfuse.errors import DPFuseError
from dpfuse.exclusions import refuse
from dpfuse.gradients.kept_mean import KeptMean
from dpfuse.gradients.loss_scaling import LossScale
from dpfuse.gradients.norm import Gradients
from dpfuse.gradients.weight import GradientWeight
from dpfuse_kernels.multiply import multiply_each

__all__ = ["GradientFactors"]

REMEDY = (
    "Pass the losses of all ranks through the dpfuse.GradScaler, or of none; call set_gradient_weight() on all "
    "ranks, with one reduction, or on none. set_gradient_weight(None) takes a weight back. Where an exception "
    "ended a backward inside no_sync(), zero the gradients, give the weight again, and begin with the first batch "
    "of the window."
)
HANDLING = {  # by bit of what the ranks compare
    1: "divides its gradients by the scale of its loss",
    2: "weighs its gradients",
    4: "weighs gradients of sums",
    8: "goes on after a backward that an exception ended",
}


class GradientFactors(Feature):
    """The factors of the backward that is running, for all buckets of one wrapped model.

    While gradients are packed, they are divided by the loss scale and looked at, and multiplied with this rank's
    weight. The report, which is packed last, tells the other ranks what was found, and the weight.

    Args:
        window: counts what ranks must have in common.
        gradient_scale: factor on each rank's gradients; None is the mean.
        group: the ranks.
        in_use: gives what the model has in use of what `dpfuse.exclusions` names.
        strict: whether to wait in each backward for what weights come to.

    Attributes:
        attached: whether it is a feature of the model: one that never asks for factors has no cost of them.
        loss_scale: of the model.
        weight: of this rank.
    """

    eager = False
    _engine: Engine
    _place: ReportPlace  # where ranks tell whether they have found values that are not finite

    def __init__(
        self,
        window: Window,
        gradient_scale: float | None,
        group: dist.ProcessGroup,
        in_use: Callable[[], Mapping[str, str]],
        *,
        strict: bool,
    ) -> None:
        self.attached = False
        self.loss_scale = LossScale()
        self.weight = GradientWeight(group, lambda: self._engine.completed, window)
        self._window = window
        # Is the sum over the ranks finite wherever all summands are? That of a mean is.
        self._bounded = gradient_scale is None or abs(gradient_scale) * group.size() <= 1
        self._in_use = in_use
        self._strict = strict
        self._kept_mean = KeptMean()
        self._keeps_mean = False  # whether that is known since this window began
        self._handling = 0  # bits of HANDLING, of the backward that is running
        self._unscales = False  # whether packing undoes the loss scale in it
        self._factor: Tensor | None = None  # what packing multiplies with, [] float32; None is 1
        self._found: _Found | None = None  # values that are not finite; None where they are not looked for
        self._report: Report | None = None  # that of the last bucket, once it was packed

    def join(self, engine: Engine) -> None:
        """As `Feature.join`. The ranks compare what they do with gradients, whether it is attached or not."""
        self._engine, layout = engine, engine.layout
        layout.compare(Field("handling", partial(getattr, self, "_handling"), _handling_words, REMEDY, bits=4))
        self._place = layout.register("nonfinite", 1)
        self.weight.register(layout)

    def weigh(self, weight: Any, reduction: Any) -> None:
        """Give this rank's gradients a weight in the next synchronised backward; arguments as for `GradientWeight.set`.

        Raises:
            TypeError, ValueError: as `GradientWeight.set`.
            DPFuseError: a backward is running, or these gradients cannot be weighed.
        """
        state = self._engine.reducer.state
        if state not in (IDLE, ABANDONED):
            raise DPFuseError(
                f"set_gradient_weight() was called while a backward is {state.name}, expected it before. "
                "Call it once the batch of this rank is known."
            )
        if weight is not None:
            self._refuse_weights()
        self.weight.set(weight, reduction, self._device)
        self._window.died = False  # a weight that is given after it is that of what comes from here on

    def step(self, order: int, bucket: Bucket, buffer: CommBuffer, report: Report | None) -> PackStep | None:
        return _FactorStep(self, buffer, report)

    def backward_begins(self, *, sync: bool, announced: bool) -> None:
        """As `Watcher.backward_begins`.

        Raises:
            DPFuseError: as `LossScale.begins`, gradients with a weight cannot have one, or two models would multiply.
        """
        buckets = self._engine.buckets
        scale = self.loss_scale.begins(
            lambda: set(map(id, self._trained())),
            lambda ids, factor: Gradients(buckets, (), only=ids).multiply(factor),
            announced=announced,
        )
        if not self._window.is_open:
            # Of the first weight of a model, given inside a window, it is not known what gradients were before.
            self._keeps_mean = announced and self.weight.reduction == "sum"
            self._kept_mean.begin()
        if self._keeps_mean:
            self._keep_mean(sync=sync)
        if not sync:
            return
        unscales = scale is not None and self._bounded and all(map(_can_unscale, buckets))
        self._factor, self._report = self.weight.factor, None
        if scale is not None and unscales:
            # In float64, as torch does: some compilers' division in float32 is off by a digit.
            inverse = scale.to(self._device, torch.float64, non_blocking=True).reciprocal().float()
            self._factor = inverse if self._factor is None else self._factor * inverse
        self._unscales, looks = unscales, unscales or bool(self.loss_scale.unscaled)
        self._found = _Found(max(len(bucket.params) for bucket in buckets) + 1, self._device) if looks else None
        weighs = self.weight.begins(buckets[0].averaging.pre_scale * buckets[0].averaging.post_scale)
        if weighs:
            self._refuse_weights()  # a hook may have come since
        if (unscales or weighs) and shared and averaged_elsewhere(self._trained()):
            raise DPFuseError(
                "one backward reaches outputs of two wrapped models that share parameters. Their gradients are to be "
                "unscaled or weighed, which each model would do; expected a backward for each model. Call backward() "
                "for the loss of one, and then for that of the other."
            )
        self._window.compare_backwards(not weighs)
        kind = (1 if self.weight.reduction == "mean" else 2) + 4 * self._window.died
        self._handling = unscales + weighs * 2 * kind

    def delivered(self) -> None:
        """As `Watcher.delivered`.

        Raises:
            DPFuseError: as `GradientWeight.hear`.
        """
        report, found = self._report, self._found
        assert report is not None
        if found is not None:
            somewhere = report.sums(self._place)[0] != 0
            if report.group.size() > 1 and somewhere.is_cuda:
                somewhere = somewhere | report.wrong()  # the gradients are spoilt if the ranks do not agree
            ids = frozenset(id(param) for bucket in self._engine.buckets for param in bucket.delivered())
            self.loss_scale.delivered(ids, somewhere.float(), unscaled=self._unscales)
        self._factor, self._found, self._report, self._handling = None, None, None, 0
        multiplier = self.weight.delivered(report)
        if multiplier is not None:
            Gradients.delivered(self._engine.buckets).multiply(multiplier)
        self.weight.hear(wait=self._strict)

    def _trained(self) -> list[Tensor]:
        return [param for bucket in self._engine.buckets for param in bucket.params if param.requires_grad]

    def _keep_mean(self, *, sync: bool) -> None:
        """Let a mean that gradients keep survive the division by the sum of the weights."""
        if not sync:
            self._kept_mean.note(self._trained())
        elif self.weight.value is not None and self.weight.reduction == "sum":
            # What was frozen since this window began is averaged, too.
            params = [one for bucket in self._engine.buckets for one in bucket.params]
            params = [one for one in params if one.requires_grad or self._kept_mean.noted(one)]
            self._kept_mean.multiply(params, self.weight.value, self._held())

    def _held(self) -> set[int]:
        """Return the ids of the parameters of which buckets have accumulated gradients."""
        return {
            id(param)
            for bucket in self._engine.buckets
            if bucket.parts.feed.held
            for index, param in zip(bucket.plan.params, bucket.params, strict=True)
            if index in bucket.parts.feed.held
        }

    @property
    def _device(self) -> torch.device:
        return torch.device(self._engine.buckets[0].plan.device)

    def _refuse_weights(self) -> None:
        refuse("weight", "gradients were given a weight with", self._in_use())


class _Found:
    """Values of one backward that are not finite, for buckets of at most so many slots."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.counts = torch.zeros(slots, dtype=torch.int32, device=device)  # by place in the bucket, over all buckets
        self.others = torch.zeros((), dtype=torch.float32, device=device)  # above 0 if others were found


class _FactorStep(PackStep):
    """The factors of one bucket. The report travels with that which is packed last, and is None for the others."""

    def __init__(self, factors: GradientFactors, buffer: CommBuffer, report: Report | None) -> None:
        self._factors = factors
        self._buffer = buffer
        self._report = report

    def before(self, arguments: PackArguments) -> None:
        arguments.factor = self._factors._factor
        if self._factors._found is not None and arguments.table.slots:
            arguments.counts = self._factors._found.counts[: len(arguments.table.slots)]

    def outside(self, names: Sequence[str], tensors: list[Tensor]) -> None:
        factor, found = self._factors._factor, self._factors._found
        if found is not None and tensors:
            if tensors[0].dtype in (torch.float32, torch.float64):
                one = torch.ones_like(found.others) if factor is None else factor
                torch._amp_foreach_non_finite_check_and_unscale_(tensors, found.others, one)
                return
            # On CUDA that is not for every dtype.
            found.others += torch.stack(torch._foreach_norm(tensors, math.inf)).isfinite().logical_not().any()
        if factor is not None:
            multiply_each(tensors, factor)

    def after(self, arguments: PackArguments) -> None:
        factors, found = self._factors, self._factors._found
        if (
            found is not None
            and arguments.counts is not None
            and arguments.counts.data_ptr() != found.counts.data_ptr()
        ):
            found.others += arguments.counts.any()  # another feature has brought its own
        if self._report is None:
            return
        factors._report = self._report
        packed = self._buffer.report
        if factors._factor is not None and arguments.report is not None:
            packed.copy_(arguments.report)  # the factor is for gradients alone
        if found is not None:
            self._report.write(packed, factors._place, found.others + found.counts.any())
        factors.weight.tell(self._report, packed)


def _can_unscale(bucket: GradBucket) -> bool:
    # float16 would lose small gradients that carry no scale.
    return bucket.parts.exchange.takes_factors and bucket.averaging.dtype != "float16"


def _handling_words(what: int) -> str:
    found = " and ".join(words for bit, words in HANDLING.items() if what & bit)
    return found or "averages its gradients as they are"
