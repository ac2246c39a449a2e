"""What a bucket is made of: a feed, an exchange, a delivery, and pack steps. Interfaces only."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from dpfuse_kernels import PointerTable

__all__ = ["BucketObserver", "Delivery", "Exchange", "Feed", "PackArguments", "PackStep"]


@dataclass(slots=True)
class PackArguments:
    """How one bucket is packed; a pack step changes what it needs, so that all steps ride in one launch."""

    table: PointerTable  # of the gradients, and of the report behind them
    missing: Sequence[int]  # registration indices of the parameters without a gradient, or frozen
    scale: float  # multiplies every gradient before the sum
    report: Tensor | None = None  # what the report packs, [numel]
    counts: Tensor | None = None  # where to count NaN and infinite values, [slots] int32
    factor: Tensor | None = None  # multiplies every gradient, [] float32 on the device
    residual: Tensor | None = None  # added before rounding; holds afterwards what rounding took, float32


class Feed:
    """How gradients come into the buffer. All but `pack` does nothing unless a feed overrides it."""

    held: Set[int] = frozenset()  # registration indices of the parameters of which the buffer holds a part already

    def hooks(self) -> dict[int, Callable[[], None]]:
        """What to call when the gradient of a parameter, by registration index, is ready."""
        return {}

    def pack(self, grads: list[Tensor | None], arguments: PackArguments) -> None:
        """Write all gradients into the buffer; None is a gradient of zeros."""
        raise NotImplementedError

    def sent(self) -> None:
        """The buffer is on its way, or was sent empty: what was packed before counts no more."""

    def release(self) -> None:
        """Put what the buffer holds back into `.grad`: the buffer, or its scale, is about to change."""


class Exchange:
    """How a packed buffer becomes the sum over all ranks. All but `start` does nothing unless an exchange overrides it.

    Args:
        group: the ranks.

    Attributes:
        takes_factors: whether what it sums is multiplied for the mean, and may be multiplied further.
        error: why the result of the last exchange cannot be used, if it cannot.
        bytes_in_place: of the gradients that the last exchange has reduced where they lie.
    """

    takes_factors = True
    error: Exception | None = None
    bytes_in_place = 0

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def bind(self, params: Sequence[Tensor]) -> set[int]:
        """Work for these parameters, or none; returns the places of those that travel outside the buffer."""
        return set()

    def take(self, scale: float, steps: Sequence[PackStep]) -> list[int]:
        """Take what travels outside the buffer; returns the registration indices without a gradient."""
        return []

    def empty(self) -> None:
        """Send zeros for what travels outside the buffer, after an error or for an empty bucket."""

    def start(self, flat: Tensor) -> dist.Work:
        """Begin; the returned work is waited for. Starting the first collective is the last thing that can fail."""
        raise NotImplementedError

    def tensors(self, flat: Tensor) -> list[Tensor]:
        """What travels, for observers."""
        return [flat]

    def landed(self, work: dist.Work) -> None:
        """The work was waited for."""

    def deliver(self, untouched: Set[int]) -> None:
        """Hand over what travelled outside the buffer, except for these parameters."""

    def discard(self) -> None:
        """What travelled outside the buffer is of no use."""


class Delivery:
    """How reduced gradients get from the buffer to the parameters."""

    def hand_out_early(self, missing: Set[int]) -> None:
        """The buffer is packed, and not sent yet; these parameters have no gradient."""

    def sent(self, work: dist.Work, *, clean: bool) -> None:
        """The buffer is on its way; `clean` if every gradient is in it and nothing failed."""

    def landed(self) -> None:
        """The buffer holds the sum."""

    def deliver(self, missing: Set[int], untouched: Set[int]) -> bool:
        """Make the buffer's content the gradients of all parameters, except the untouched ones.

        Returns whether all of them were handed over in one pass.
        """
        raise NotImplementedError

    def discard(self) -> None:
        """The buffer's content is of no use; what shares its memory becomes zeros."""


class PackStep:
    """What a feature does around the packing of a bucket. Each method does nothing unless a feature overrides it."""

    def before(self, arguments: PackArguments) -> None:
        """The bucket is about to be packed; may change the arguments."""

    def outside(self, names: Sequence[str], tensors: list[Tensor]) -> None:
        """These gradients, of one dtype, travel outside the buffer; may change them in place."""

    def after(self, arguments: PackArguments) -> None:
        """The bucket is packed; may raise, which makes the backward fail on every rank."""

    def delivered(self, untouched: Set[int]) -> None:
        """The gradients were handed over, except for those of these parameters, which no rank has used."""


class BucketObserver(Protocol):
    """Is told how each bucket travels."""

    def sent(self, tensors: Sequence[Tensor], work: dist.Work, *, is_last: bool) -> None:
        """These tensors were given to the process group."""

    def wait_begins(self, flat: Tensor) -> None:
        """Backward is over, and waits for a bucket."""

    def wait_ends(self) -> None:
        """The bucket has landed."""
