"""A communication buffer gets new memory while a program uses gradients that lie in it. Knows no bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter, is_
from sys import getrefcount

import torch
from torch import Tensor

from dpfuse.engine.comm_buffer import CommBuffer
from dpfuse.engine.torch_private import holders_at, is_private
from dpfuse_kernels.layout import TransposeCheck

__all__ = ["RenewedMemory"]

_grad, _version = attrgetter("grad"), attrgetter("_version")


class RenewedMemory:
    """A buffer gets new memory before it is written, if a program still holds a gradient that lies in it.

    A gradient is held if other code refers to it or to its memory: a Python name, an alias, an array of numpy, a graph
    of autograd, another process. The gradient that a parameter still has does not count: torch itself would write it.

    Args:
        buffer: holds gradients as they are, on a CPU. On a GPU, a stream may still read memory without references.

    Attributes:
        gradients: what `.grad` becomes, in the order of the parameters.
    """

    def __init__(self, buffer: CommBuffer) -> None:
        self.buffer = buffer
        self._followers: list[Callable[[], None]] = []
        self._is_filled = False
        self._note()

    def follow(self, use_buffer: Callable[[], None]) -> None:
        """Call `use_buffer` whenever the buffer has got new memory."""
        self._followers.append(use_buffer)

    def before_write(self, *, lists: int = 0) -> None:
        """Note that the buffer is about to be written. The first call of a backward may give it new memory.

        Args:
            lists: how many lists the caller has of all gradients.
        """
        if self._is_filled:
            return
        if self._alias.data_ptr() != self.buffer.flat.data_ptr():
            self._renew()  # it was moved to memory that is shared with another process
            return
        if self._transposed.fails():  # first, since to replace some begins the check again with the others
            self._replace(range(len(self.gradients)))
        addresses = list(map(Tensor.data_ptr, self.gradients))
        if addresses != self._addresses:
            self._replace([place for place, one in enumerate(addresses) if one != self._addresses[place]])
        names = list(map(getrefcount, self.gradients))
        if names != self._names:
            known = 1 + lists  # references to each `.grad` that are our own
            for place, param in enumerate(self.buffer.params):
                names[place] -= known * (param.grad is self.gradients[place])
        holders = getrefcount(self._storage), holders_at(self._storage._cdata)
        if names != self._names or holders != self._holders:
            self._renew()

    def filled(self, *, is_filled: bool) -> None:
        """Note whether the buffer holds gradients of the running backward before it is packed."""
        self._is_filled = is_filled

    def may_replace(self, grad: Tensor) -> bool:
        """Whether nothing was added to a gradient since autograd made it, so that the buffer may take its place.

        What is older may be memory that a program has assigned to `.grad`, and in which it waits for the mean.
        """
        return not grad.is_inference() and grad._version == 0

    def elsewhere(self, grads: list[Tensor | None], *, complete: bool) -> list[int]:
        """Return the places of the gradients that must stay where they are, and get a copy of the mean.

        Args:
            grads: all gradients, by place. Only this list and the parameters refer to them, unless a program does.
            complete: whether every gradient was written in this backward.
        """
        try:
            if complete and not torch.is_grad_enabled() and not any(map(_version, grads)):
                return []
        except (AttributeError, RuntimeError):  # None, or made in inference mode, where no versions are counted
            pass
        low, high = self.buffer.table.storage_range
        names = list(map(getrefcount, grads))
        return [
            place
            for place, grad in enumerate(grads)
            if grad is not None
            and not low <= grad.data_ptr() < high
            and not (names[place] == _NAMES and is_private(grad))
        ]

    def replaced(self) -> list[int]:
        """Return the places of the parameters whose gradient does not lie in the buffer."""
        grads = list(map(_grad, self.buffer.params))
        if all(map(is_, grads, self.gradients)) and list(map(Tensor.data_ptr, self.gradients)) == self._addresses:
            return []
        return [
            place
            for place, (grad, address) in enumerate(zip(grads, self._addresses, strict=True))
            if grad is None or grad.data_ptr() != address
        ]

    @torch.inference_mode(False)  # what is made there cannot be written outside of it
    def _renew(self) -> None:
        """Give the buffer new memory."""
        self.buffer.renew()
        self._note()
        for use_buffer in self._followers:
            use_buffer()

    def _replace(self, places: Iterable[int]) -> None:
        """Forget gradients that have changed in place: `param.grad.data = x`, `param.grad.t_()`."""
        fresh = self.buffer.views_in(self._alias)
        for place in places:
            self.gradients[place] = fresh[place].data
        self._transposed = TransposeCheck(self.gradients)

    def _note(self) -> None:
        """Make gradients in memory that no program knows yet, and count the references to them."""
        # The alias has a storage of its own, so that other aliases that dpfuse makes of the buffer do not count. The
        # gradients are no views for autograd, so each of them has a version counter of its own.
        self._alias: Tensor = torch.utils.dlpack.from_dlpack(self.buffer.flat)
        self._storage = self._alias.untyped_storage()
        self.gradients = [view.data for view in self.buffer.views_in(self._alias)]
        self._transposed = TransposeCheck(self.gradients)
        self._addresses = list(map(Tensor.data_ptr, self.gradients))
        self._names = list(map(getrefcount, self.gradients))
        self._holders = getrefcount(self._storage), holders_at(self._storage._cdata)


def _names_of_one() -> int:
    param = torch.zeros(1, requires_grad=True, device="cpu")
    param.grad = torch.zeros(1, device="cpu")
    return next(map(getrefcount, [param.grad]))


_NAMES = _names_of_one()  # references to a gradient that only its parameter has, and a list
