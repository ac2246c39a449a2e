"""What gradients are when backwards begin to add sums to them, which are divided later. Knows no backward."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from dpfuse_kernels.multiply import multiply_each

__all__ = ["KeptMean"]


class KeptMean:
    """What gradients were when a window of backwards began.

    Losses that are sums are divided by a sum of weights after the average. That divides a mean from an earlier window,
    too, so it is multiplied by the weight before. If several backwards make a window, the weight comes with the last of
    them, when `.grad` is more than that mean. So copies are kept of gradients that are there when a window begins.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> weight.grad = torch.tensor([2.0])
        >>> kept = KeptMean()
        >>> kept.note([weight])
        >>> weight.grad += 5
        >>> kept.multiply([weight], torch.tensor(3.0))
        >>> weight.grad  # 2 * 3 + 5
        tensor([11.])
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()  # ids of the parameters that were trained in this window so far
        self._copies: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Begin another window."""
        self._seen.clear()
        self._copies.clear()

    def note(self, params: Iterable[Tensor]) -> None:
        """Copy the gradients of these parameters, which are about to be added to. Once in a window."""
        for param in self._new_of(params):
            if param.grad is not None:
                self._copies[id(param)] = param.grad.detach().clone()

    def noted(self, param: Tensor) -> bool:
        """Return whether a backward of this window may have added to the gradient of this parameter."""
        return id(param) in self._seen

    @torch.no_grad()
    def multiply(self, params: Collection[Tensor], weight: Tensor | float, held: Collection[int] = ()) -> None:
        """Multiply the mean that is inside of these gradients by `weight`, and begin another window.

        Args:
            params: whose gradients are averaged next.
            weight: of this rank, a number or [] float32 on their device.
            held: ids of parameters whose gradients lie in their bucket. What the product adds goes into `.grad`.
        """
        for param in self._new_of(params):
            if param.grad is not None:
                multiply_each([param.grad], weight)
        for param in params:
            copy = self._copies.get(id(param))
            if copy is None or (param.grad is None and id(param) not in held):  # the program has dropped it
                continue
            multiply_each([copy], weight - 1)
            if param.grad is None:
                param.grad = copy
            else:
                param.grad.add_(copy)
        self.begin()

    def _new_of(self, params: Iterable[Tensor]) -> list[Tensor]:
        found = [param for param in params if id(param) not in self._seen]
        self._seen.update(map(id, found))
        return found
