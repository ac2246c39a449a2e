"""The norm of gradients, and clipping by it: whole communication buffers where they lie in them. Knows no backward."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import reduce
from numbers import Real
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dpfuse.engine.backward_table import ABANDONED, IDLE
from dpfuse.engine.bucket import GradBucket
from dpfuse.engine.reducer import Reducer
from dpfuse.errors import DPFuseError
from dpfuse_kernels import MxTable, PointerTable, multiply, squared_norm
from dpfuse_kernels.multiply import multiply_each
from dpfuse_kernels.squared_norm import ROW, row_norms

__all__ = [
    "GradientReader",
    "Gradients",
    "Measurable",
    "clip",
    "clipping_factor",
    "norm_arguments",
    "norms_by_bucket",
    "norms_by_parameter",
    "refuse_nonfinite",
    "refuse_running",
]

EPSILON = 1e-6  # added to the norm in the denominator, as in torch, so that no division is by 0


class Measurable(Protocol):
    """Gradients that can be measured and multiplied, wherever they lie."""

    def norm(self, order: float) -> Tensor:
        """Return their norm of that order, [] on their device, in float64 where some gradient is, else in float32."""

    def multiply(self, factor: Tensor) -> None:
        """Multiply them by a scalar that only the device may know."""


class _Part(NamedTuple):
    """The gradients that one buffer has delivered."""

    grads: list[Tensor | None]
    table: PointerTable  # of the buffer


class Gradients:
    """What the `.grad` of some parameters is now, by the buffer that it may lie in.

    What was done to `.grad` since backward does not matter: it is read where it is. Only where every gradient of a
    bucket still is its view of the buffer, they are one call on the CPU. A bucket is one launch on a GPU either way.

    Args:
        buckets: of some of the parameters; none of them is in flight.
        others: the parameters that are in none of them.
        only: ids of the parameters of these buckets whose gradients count; None for all.
    """

    def __init__(
        self, buckets: Sequence[GradBucket], others: Iterable[nn.Parameter], *, only: Set[int] | None = None
    ) -> None:
        self._parts: list[_Part] = []
        loose: list[Tensor] = list(others)
        for bucket in buckets:
            buffer = bucket.parts.buffer
            params = buffer.params
            # Pairs of real numbers and eight-bit blocks are no gradients.
            if not params or buffer.dtype.is_complex or isinstance(buffer.gradients, MxTable):
                loose += _chosen(bucket.params, only)
                continue
            grads = [param.grad if only is None or id(param) in only else None for param in params]
            self._parts.append(_Part(grads, buffer.gradients))
            if len(params) < len(bucket.params):
                packed_ids = set(map(id, params))
                loose += [param for param in _chosen(bucket.params, only) if id(param) not in packed_ids]
        self._loose = [param.grad for param in loose if param.grad is not None]

    @classmethod
    def delivered(cls, buckets: Sequence[GradBucket]) -> Gradients:
        """Return those that the last backward has delivered. What else a parameter keeps is not of that backward."""
        if not any(bucket.untouched for bucket in buckets):
            return cls(buckets, ())
        return cls(buckets, (), only={id(param) for bucket in buckets for param in bucket.delivered()})

    @torch.no_grad()
    def norm(self, order: float) -> Tensor:
        """As `Measurable.norm`."""
        return self.squares().sqrt().to(self._kind()) if order == 2 else self._norm(order)

    @torch.no_grad()
    def multiply(self, factor: Tensor) -> None:
        """As `Measurable.multiply`."""
        loose = self._loose
        for grads, table in self._parts:
            try:
                multiply(grads, table, factor.to(table.flat.device))
            except ValueError:  # a gradient is of another dtype by now, or is sparse
                loose = [*loose, *_present(grads)]
        for group in _grouped(loose):
            multiply_each([_stored(grad) for grad in group], factor.to(group[0].device))

    @torch.no_grad()
    def squares(self) -> Tensor:
        """The sum of their squares, a scalar in float64 on their device."""
        squares: list[Tensor] = []
        loose = self._loose
        for grads, table in self._parts:
            try:
                squares.append(squared_norm(grads, table))
            except ValueError:  # a gradient is of another dtype by now, or is sparse
                loose = [*loose, *_present(grads)]
        for group in _grouped(loose):
            squares.append(row_norms([_real_numbers(grad) for grad in group]).square().sum())
        return squares[0] if len(squares) == 1 else self._total(squares).sum()

    def _norm(self, order: float) -> Tensor:
        kind = self._kind()
        norms: list[Tensor] = []
        for group in _grouped([*self._loose, *(grad for part in self._parts for grad in _present(part.grads))]):
            numbers = [_magnitudes(grad, order) for grad in group]
            numbers = [tensor for tensor in numbers if tensor.numel()]
            norms += torch._foreach_norm(numbers, order, dtype=kind) if numbers else ()
        norm: Tensor = torch.linalg.vector_norm(self._total(norms), order)
        return norm

    def _total(self, parts: list[Tensor]) -> Tensor:
        """All parts on one device, [parts]; a zero where there are none."""
        return torch.stack([part.to(parts[0].device) for part in parts]) if parts else torch.zeros(1, device="cpu")

    def _kind(self) -> torch.dtype:
        dtypes = {grad.dtype.to_real() for grad in self._loose}
        dtypes |= {grads[0].dtype.to_real() for grads in map(_present, (part.grads for part in self._parts)) if grads}
        return reduce(torch.promote_types, dtypes, torch.float32)


def clipping_factor(largest: float, norm: Tensor) -> Tensor:
    """Return what gradients with this norm, [], are multiplied with, so that their norm is at most `largest`."""
    return torch.clamp(largest / (norm + EPSILON), max=1.0)


@torch.no_grad()
def clip(gradients: Measurable, largest: float, norm: Tensor) -> None:
    """Multiply gradients so that `norm`, which is theirs, is at most `largest`."""
    factor = clipping_factor(largest, norm)
    if factor.is_cuda or factor != 1.0:  # on a GPU only the device knows
        gradients.multiply(factor)


def refuse_nonfinite(norm: Tensor, order: float) -> Tensor:
    """Return the norm of that order. Waits for the device.

    Raises:
        DPFuseError: it is NaN or infinite.
    """
    if not norm.isfinite():
        raise DPFuseError(
            f"the norm of order {order} of the gradients is {norm.item()}, expected a finite one. Skip the step, or "
            "pass error_if_nonfinite=False; check_finite names the parameters."
        )
    return norm


@torch.no_grad()
def norms_by_parameter(named: Iterable[tuple[str, Tensor]], order: float) -> dict[str, Tensor]:
    """The norm of that order of each gradient there is, by the name of its parameter.

    Each is a scalar on the device of its gradient, in float64 where that is, else in float32.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> layer(torch.tensor([3.0, 4.0])).backward()
        >>> norms_by_parameter(layer.named_parameters(), 2.0)
        {'weight': tensor(5.), 'bias': tensor(1.)}
    """
    grads = {name: param.grad for name, param in named if param.grad is not None}
    norms: dict[int, Tensor] = {}
    for group in _grouped(grads.values()):
        kind = torch.promote_types(group[0].dtype.to_real(), torch.float32)
        quick = [grad for grad in group if grad.is_cuda or order != 2 or grad.numel() <= ROW]
        numbers = [_magnitudes(grad, order) for grad in quick]
        norms |= zip(map(id, quick), torch._foreach_norm(numbers, order, dtype=kind) if numbers else (), strict=True)
        for grad in group:
            if id(grad) not in norms:
                norms[id(grad)] = row_norms([_real_numbers(grad)]).square().sum().sqrt().to(kind)
    return {name: norms[id(grad)] for name, grad in grads.items()}


@torch.no_grad()
def norms_by_bucket(norms: Mapping[str, Tensor], buckets: Iterable[Sequence[str]], order: float) -> dict[str, Tensor]:
    """Return the norm of each bucket, as "bucket 0" and so on. A gradient in no bucket keeps its own name.

    Example:
        >>> norms_by_bucket({"a": torch.tensor(3.0), "b": torch.tensor(4.0), "c": torch.tensor(1.0)}, [["a", "b"]], 2.0)
        {'bucket 0': tensor(5.), 'c': tensor(1.)}
    """
    rest = dict(norms)
    parts: dict[str, Tensor] = {}
    for number, names in enumerate(buckets):
        inside = [rest.pop(name) for name in names if name in rest]
        if inside:
            parts[f"bucket {number}"] = torch.linalg.vector_norm(torch.stack(inside), order)
    return parts | rest


class Signature(Protocol):
    """Tells whether a module is still what it was."""

    looks: int  # how often the module was looked at

    def unchanged(self) -> bool:
        """Whether it is what it was at the last look."""


class GradientReader:
    """Finds a wrapped module's gradients whenever they are asked for; what does not change it looks up once."""

    def __init__(self, module: nn.Module, signature: Signature, rank: int) -> None:
        self._module = module
        self._signature = signature
        self._rank = rank
        self._looks = 0  # as of which of its looks `_others` is right
        self._others: list[nn.Parameter] = []  # parameters that no bucket has; all, where buckets have removed ones
        self._reads_buckets = True  # whether all parameters that they have are still in the module

    def read(self, reducer: Reducer) -> Gradients:
        """Return all gradients as they are now. If the module has changed since the last forward, no buffer is read.

        Raises:
            DPFuseError: a backward is running, or was interrupted.
        """
        refuse_running(reducer, self._rank)
        unchanged = self._signature.unchanged()
        if not unchanged or self._looks != self._signature.looks:
            params = list(self._module.parameters())
            if not unchanged:
                return Gradients((), params)
            bucketed = {id(param) for bucket in reducer.buckets for param in bucket.params}
            self._looks = self._signature.looks
            self._reads_buckets = bucketed.issubset(map(id, params))
            self._others = [param for param in params if not self._reads_buckets or id(param) not in bucketed]
        return Gradients(reducer.buckets if self._reads_buckets else (), self._others)


def refuse_running(reducer: Reducer, rank: int) -> None:
    """Raise DPFuseError unless gradients can be read now, for their norm or for a step of a sharded optimizer."""
    if reducer.state is ABANDONED:
        raise DPFuseError(
            f"rank {rank}: the gradients are needed for their norm or for a step, and the last backward raised an "
            "exception, expected one that has returned. They are those of a part of a backward: call zero_grad(), and "
            "go on with the next batch."
        )
    if reducer.state is not IDLE:
        raise DPFuseError(
            f"rank {rank}: the norm of the gradients was asked for while a backward is {reducer.state.name}, expected "
            "it between backwards. Ask once backward() has returned."
        )


def norm_arguments(max_norm: Any, norm_type: Any) -> tuple[float, float]:
    """Both as numbers.

    Raises:
        TypeError, ValueError: one of them is none that can be used.
    """
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if isinstance(value, bool) or not isinstance(value, (Real, Tensor)):
            raise TypeError(
                f"{name} must be a number, got {value!r} of type {type(value).__name__}; pass for example {name}=2.0"
            )
    largest, order = float(max_norm), float(norm_type)
    if not largest >= 0:
        raise ValueError(f"max_norm must be 0 or more, got {largest}; math.inf clips nothing")
    if math.isnan(order):
        raise ValueError("norm_type must be a number such as 2.0 or math.inf, got nan")
    return largest, order


def _chosen(params: Sequence[Tensor], only: Set[int] | None) -> Sequence[Tensor]:
    return params if only is None else [param for param in params if id(param) in only]


def _present(grads: Iterable[Tensor | None]) -> list[Tensor]:
    return [grad for grad in grads if grad is not None]


def _grouped(grads: Iterable[Tensor]) -> list[list[Tensor]]:
    """By device and dtype, as calls for many tensors need them."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    return list(groups.values())


def _stored(grad: Tensor) -> Tensor:
    """The memory of a gradient: of a sparse one, whose multiple has the multiple of each value, its values."""
    if grad.layout is torch.strided:
        return grad
    return grad._values() if grad.layout is torch.sparse_coo else grad.values()


def _elements(grad: Tensor) -> Tensor:
    """All numbers of a gradient, each once; of a sparse one without the zeros that it does not hold."""
    return _stored(grad.coalesce() if grad.layout is torch.sparse_coo else grad)


def _real_numbers(grad: Tensor) -> Tensor:
    """Real numbers with the same norm of order 2."""
    grad = _elements(grad)
    return torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad


def _magnitudes(grad: Tensor, order: float) -> Tensor:
    """Real numbers with the same norm of any order. Zeros count in no norm of an order above 0."""
    grad = _elements(grad) if order > 0 else grad.to_dense()
    return grad.abs() if grad.is_complex() else grad
