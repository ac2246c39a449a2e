"""What a narrow wire has rounded away, by parameter: sent with the next gradients, saved with a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpfuse.engine.averaging import UNCHANGED, Wire, real_dtype
from dpfuse.engine.bucket import GradBucket
from dpfuse.engine.comm_buffer import CommBuffer
from dpfuse.engine.exchanges.ordered import Rounding
from dpfuse.engine.feature import Feature
from dpfuse.engine.plan import Bucket
from dpfuse.engine.protocols import PackArguments, PackStep
from dpfuse.engine.report import Report
from dpfuse.engine.user_line import warn_at_user
from dpfuse_kernels import MxTable

__all__ = ["ErrorFeedback", "ResidualSpec"]


class ResidualSpec(NamedTuple):
    """Of which shape a parameter's residual is, and where."""

    name: str
    shape: tuple[int, ...]  # of real numbers: those of complex parameters end in 2
    device: torch.device


class ErrorFeedback(Feature):
    """The residuals of one rank: what rounding has taken from its gradients, and from the sums that it has formed.

    They are float32, in units of what is sent: gradients times 1 / number of ranks, or times `gradient_scale`. Each
    is added to the next gradient before that is rounded. A wrapper with `error_feedback=True` has one as
    `model.error_feedback`; it is a `Stateful` of `torch.distributed.checkpoint`. A copy of a wrapper begins at zero.

    Example:
        >>> import dpfuse, torch
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = dpfuse.DataParallel(torch.nn.Linear(1, 1), wire_dtype=torch.bfloat16, error_feedback=True)
        >>> model(torch.tensor([[257.0]])).sum().backward()
        >>> model.weight.grad, model.error_feedback.state_dict()["rank0"]["weight"]
        (tensor([[256.]]), tensor([[1.]]))
        >>> dist.destroy_process_group()

    Source: Seide et al., 1-bit stochastic gradient descent, Interspeech 2014; Karimireddy et al., Error feedback fixes
    SignSGD, ICML 2019.
    """

    def __init__(self, rank: int, world_size: int, wire: Wire = UNCHANGED) -> None:
        self._rank = rank
        self._world_size = world_size
        self._wire = wire
        self._residuals: dict[int, _Residual] = {}  # of buckets that are being made, by order
        self._specs: dict[str, ResidualSpec] = {}
        self._values: dict[str, Tensor] = {}  # parts of flat tensors, one per bucket; zero where there is none
        self._last = -1  # the bucket of the running backward that was packed last

    def rounding(self, order: int, bucket: Bucket, buffer: CommBuffer) -> Rounding | None:
        if not self._wire.narrowed(real_dtype(bucket.dtype)):
            return None
        residual = self._residuals[order] = _Residual(self, order, buffer)
        return residual

    def step(self, order: int, bucket: Bucket, buffer: CommBuffer, report: Report | None) -> PackStep | None:
        """As `Feature.step`: of dense gradients that travel in a narrower dtype."""
        if not buffer.params or not self._wire.narrowed(real_dtype(bucket.dtype)):
            return None
        return self._residuals.pop(order, None) or _Residual(self, order, buffer)

    def state_dict(self) -> dict[str, Any]:
        """The residuals of this rank, by parameter, under a key of its own; to be asked for between steps.

        Returns:
            `world_size`, and under `rank0`, on rank 0, tensors by parameter name, float32 in the parameters' shapes.
        """
        self._forget_what_was_lost()
        values = {name: self._value(spec) for name, spec in self._specs.items()}
        return {"world_size": self._world_size, f"rank{self._rank}": values}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with residuals that were saved on this rank; those that do not fit begin at zero, with a warning.

        Args:
            state_dict: what `state_dict` returned on a rank of this number, among equally many.
        """
        self.delivered()
        saved, size = state_dict.get(f"rank{self._rank}"), state_dict.get("world_size")
        if saved is None or size != self._world_size:
            self._zero(self._specs)
            self._warn(
                f"error feedback begins at zero: the state is that of {size} ranks and has "
                f"{', '.join(key for key in state_dict if key != 'world_size')}, expected {self._world_size} ranks and "
                f"rank{self._rank}. What was rounded away belongs to the gradients of one rank"
            )
            return
        fitting = [name for name, spec in self._specs.items() if name in saved and saved[name].shape == spec.shape]
        with torch.no_grad():
            for name in fitting:
                spec = self._specs[name]
                if name not in self._values:
                    self._values[name] = torch.zeros(spec.shape, device=spec.device)
                self._values[name].copy_(saved[name])
        if others := [name for name in self._specs if name not in fitting]:
            self._zero(others)
            self._warn(f"error feedback of {_some(others)} begins at zero: the state has none of that shape")

    def reset(self) -> None:
        """Set the residuals to zero, since other parameters were loaded: they belong to gradients of the old ones."""
        self.delivered()
        self._zero(self._specs)

    def plan(self, buckets: Iterable[GradBucket]) -> None:
        """Keep the residuals of the parameters of these buckets alone; others are lost, with a warning."""
        self._forget_what_was_lost()
        specs = [
            spec
            for bucket in buckets
            for step in bucket.parts.steps
            if isinstance(step, _Residual)
            for spec in step.specs
        ]
        self._specs = {spec.name: spec for spec in specs}
        shapes = {spec.name: spec.shape for spec in specs}
        kept = {name: value for name, value in self._values.items() if shapes.get(name) == value.shape}
        gone, self._values = [name for name in self._values if name not in kept], kept
        if gone:
            self._warn(
                f"error feedback of {_some(gone)} is lost: the parameter is no longer trained, or its shape or wire is "
                "another. What was rounded away last will not be sent"
            )

    def begin(self, order: int) -> None:
        """A bucket is about to be packed, of that place in the order of communication."""
        if order <= self._last:
            self._forget_what_was_lost()  # it is another backward, and the one before was not delivered
        self._last = order

    def move(self, names: Sequence[str], views: Sequence[Tensor]) -> None:
        """Let the residuals of these parameters lie here, [shape of each] float32, from now on."""
        for name, view in zip(names, views, strict=True):
            if name in self._values:
                view.copy_(self._values[name])
            self._values[name] = view

    def delivered(self) -> None:
        """All gradients that were packed have arrived."""
        self._last = -1

    def _forget_what_was_lost(self) -> None:
        """Set the residuals to zero if the last packed gradients did not arrive: what was sent is not known."""
        if self._last >= 0:
            self.delivered()
            self._zero(self._specs)
            self._warn(
                "error feedback begins at zero: a backward failed, or was interrupted, while gradients were sent"
            )

    def _value(self, spec: ResidualSpec) -> Tensor:
        if spec.name not in self._values:
            return torch.zeros(spec.shape, device=spec.device)
        return self._values[spec.name].clone(memory_format=torch.contiguous_format)

    def _zero(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._values:
                self._values[name].zero_()

    def _warn(self, text: str) -> None:
        warn_at_user(f"rank {self._rank}: {text}.")


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:10]))
    return f"{shown} and {len(names) - 10} more" if len(names) > 10 else shown


class _Residual(PackStep):
    """The part of a model's error feedback beside the buffer of one bucket, the `order`-th that is sent."""

    def __init__(self, feedback: ErrorFeedback, order: int, buffer: CommBuffer) -> None:
        self._feedback = feedback
        self._order = order
        self._names = buffer.names
        self._indices = buffer.indices
        self.specs = [
            ResidualSpec(name, (*shape, 2) if buffer.dtype.is_complex else shape, buffer.flat.device)
            for name, (shape, _) in zip(buffer.names, buffer.shapes, strict=True)
        ]
        self._flat: Tensor | None = None
        self._packed = False  # whether what is sent next was
        self._views: list[Tensor] = []
        self._kept: dict[int, Tensor] = {}  # by registration index, until it is known whether a rank used them

    def before(self, arguments: PackArguments) -> None:
        """As `PackStep.before`: what to add to the gradients, and where to leave what rounding takes from them."""
        table = arguments.table
        self._feedback.begin(self._order)
        self._packed = True
        if self._flat is None:
            numel = table.elements if isinstance(table, MxTable) else table.flat.numel()
            with torch.inference_mode(False):  # what is made there cannot be written outside of it
                self._flat = torch.zeros(numel, device=table.flat.device)
            self._views = [
                self._flat.as_strided(slot.shape, slot.stride, slot.offset) for slot in table.slots[: len(self._names)]
            ]
            self._feedback.move(self._names, self._views)
        for report in table.slots[len(self._names) :]:
            self._flat[report.offset :].zero_()  # nothing is added to that
        self._kept = {}
        if arguments.missing:
            views = zip(self._indices, self._views, strict=True)
            self._kept = {index: view.clone() for index, view in views if index in arguments.missing}
        arguments.residual = self._flat

    def part(self, rank: int, size: int) -> Tensor | None:
        """The part of a rank that adds up one, [numel / size]; None of a buffer that is sent empty."""
        packed, self._packed = self._packed, False
        return self._flat.view(size, -1)[rank] if packed and self._flat is not None else None

    def delivered(self, untouched: Set[int]) -> None:
        """As `PackStep.delivered`: no rank had a gradient of the untouched parameters, so what was sent is kept."""
        for index, view in zip(self._indices, self._views, strict=True):
            if index in untouched and index in self._kept:
                view.copy_(self._kept[index])
