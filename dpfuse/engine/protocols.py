"""What a bucket is made of: a feed, an exchange, a delivery, and pack steps. Interfaces only.

A bucket calls only methods that a class overrides: an empty call on the way of each gradient costs 0.1 us.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from dpfuse_kernels import PointerTable

__all__ = [
    "Companion",
    "Delivery",
    "Exchange",
    "Feed",
    "PackArguments",
    "PackStep",
]


@dataclass(slots=True)
class PackArguments:
    """How one bucket is packed. Pack steps change these arguments, so one launch does what all steps need."""

    table: PointerTable  # of the gradients, and of the report after them
    missing: Sequence[int]  # registration indices of the parameters without a gradient, or frozen
    scale: float  # multiplies every gradient before the sum
    report: Tensor | None = None  # what the report packs, [numel]
    counts: Tensor | None = None  # where to count NaN and infinite values, [slots] int32
    factor: Tensor | None = None  # multiplies every gradient, [] float32 on the device
    residual: Tensor | None = None  # added before rounding; afterwards it holds the rounding error, float32


class Feed:
    """How gradients come into the communication buffer. Methods other than `pack` do nothing unless overridden.

    Attributes:
        held: registration indices of parameters whose gradients are partly in the buffer.
        again: packs as the last `pack` did, if these gradients, and the report after them, are as usual. It gets the
            table and the scale, and returns whether it has packed them. No gradient is missing, and no step changes
            anything. None if there is no such short way.
    """

    held: Set[int] = frozenset()
    again: Callable[[list[Tensor | None], PointerTable, float], bool] | None = None

    def hooks(self) -> dict[int, Callable[[], None]]:
        """Return what to call when the gradient of a parameter is ready, by registration index."""
        return {}

    def pack(self, grads: list[Tensor | None], arguments: PackArguments) -> None:
        """Write all gradients into the buffer; None is a gradient of zeros."""
        raise NotImplementedError

    def sent(self) -> None:
        """Forget what was packed before. The buffer was sent, with gradients or empty."""

    def follow_buffer(self) -> None:
        """Use the memory that the buffer has got in place of what it had."""

    def release(self) -> None:
        """Put what the buffer holds back into `.grad`, since the buffer or its scale will change."""


class Exchange:
    """How a packed buffer becomes the sum over all ranks. Only `start` must be overridden.

    Args:
        group: the ranks.

    Attributes:
        takes_factors: whether gradients are multiplied by a factor before the sum.
        ends_in_order: whether its work has ended wherever that of a later exchange of the same kind has.
        multiplies_buffer: whether the exchange itself multiplies the buffer by the scale that `take` was given. Then
            it is packed as it is.
        error: why the result of the last exchange cannot be used, if it cannot.
        bytes_in_place: bytes of the gradients that the last exchange has reduced in their own memory.
    """

    takes_factors = True
    ends_in_order = False
    multiplies_buffer = False
    error: Exception | None = None
    bytes_in_place = 0

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def bind(self, params: Sequence[Tensor]) -> set[int]:
        """Use these parameters, or none, and return the places of those that travel outside the buffer."""
        return set()

    def take(self, scale: float, steps: Sequence[PackStep], frozen: Set[int]) -> list[int]:
        """Take what travels outside the buffer, and return the registration indices without a gradient.

        What is left in the `.grad` of a parameter in `frozen` (registration indices) is no gradient.
        """
        return []

    def empty(self, scale: float) -> None:
        """Send zeros for what travels outside the buffer, after an error or for an empty bucket.

        They travel as gradients of this scale do on the other ranks: a collective must be the same on all of them.
        """

    def start(self, flat: Tensor) -> dist.Work:
        """Start the exchange and return a work to wait for. Nothing may fail after its first collective has started."""
        raise NotImplementedError

    def started(self, work: dist.Work) -> None:
        """Queue what follows the first collective, if that needs no waiting."""

    def tensors(self, flat: Tensor) -> list[Tensor]:
        """Return the tensors that travel, for watchers."""
        return [flat]

    def landed(self, work: dist.Work) -> None:
        """Note that the work was waited for."""

    def deliver(self, untouched: Set[int]) -> None:
        """Deliver what travelled outside the buffer, except to the untouched parameters."""

    def discard(self) -> None:
        """Drop what travelled outside the buffer."""


class Delivery:
    """How reduced gradients get from the buffer to the parameters."""

    gives_views = False  # whether gradients become views of the buffer, if `deliver` returns true
    is_done = False  # whether nothing is left to `deliver` of the bucket that was sent, if it landed well

    def prepare(self, grads: list[Tensor | None], *, complete: bool) -> None:
        """Do what must come before the buffer is packed with `grads`; `complete` says that this backward wrote all."""

    def hand_out_early(self, missing: Set[int]) -> None:
        """Deliver what is possible before the buffer is sent; it is packed. `missing` have no gradient."""

    def sent(self, work: dist.Work, *, clean: bool) -> None:
        """Note that the buffer was sent; `clean` says that it holds every gradient and nothing failed."""

    def landed(self) -> None:
        """Note that the buffer holds the sum."""

    def deliver(self, missing: Collection[int], untouched: Set[int]) -> bool:
        """Make the buffer's content the gradients of all parameters, except the untouched ones.

        Returns:
            Whether all gradients were delivered in one pass.
        """
        raise NotImplementedError

    def discard(self) -> None:
        """Drop the buffer's content; gradients that share its memory become zeros."""


class PackStep:
    """What a feature does around the packing of a bucket. Each method does nothing unless a feature overrides it."""

    def before(self, arguments: PackArguments) -> None:
        """Change the arguments, if needed, before the bucket is packed."""

    def outside(self, names: Sequence[str], tensors: list[Tensor]) -> None:
        """Change in place, if needed, gradients of one dtype that travel outside the buffer."""

    def after(self, arguments: PackArguments) -> None:
        """Do something after the bucket is packed. An error raised here makes the backward fail on every rank."""

    def delivered(self, untouched: Set[int]) -> None:
        """Note that gradients were delivered, except to the untouched parameters, which no rank has used."""


class Companion(Protocol):
    """Travels beside the bucket that is sent last, in every backward that synchronises, whatever happens in it."""

    def start(self) -> None:
        """Start its collectives, after that of the bucket."""

    def finish(self) -> None:
        """Wait for them, and use what they bring."""
