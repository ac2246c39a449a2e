"""What has happened to the gradient of one parameter since it was zero. It is hardly ever read, only looked at."""

from __future__ import annotations

from weakref import ref

import torch
from torch import Tensor

from dpfuse.loop.findings import user_line

__all__ = ["WatchedGradient", "only_rescaled"]

ELEMENTS = 64  # that are copied, where the bits of a gradient are compared


class WatchedGradient:
    """Counts the backwards that have written one gradient, and notices when other code zeroes or changes it.

    Which tensor `.grad` is, and torch's count of writes, tell that without a look at a value.

    Args:
        param: whose gradient is watched, dense.
        name: of the parameter.

    Attributes:
        means: how many synchronised backwards have written it since it was zero.
        locals: how many others have, through an output of the wrapper.
        rest: how many of these came behind the last synchronised one.
        rest_line: the user's line of the last of them.
        keeps_bits: whether to copy a few elements behind each backward; else only where `rest` is above 0.
        bits: that copy, [at most 64].
        changed: how often other code has changed it between two backwards, since the last step.
        length: how many backwards have written it since the last step, or since it was zero.
        dropped: the lengths of windows that were zeroed without a step, until the rule takes them.
    """

    __slots__ = (
        "_count",
        "_seen",
        "_stepped",
        "bits",
        "changed",
        "dropped",
        "keeps_bits",
        "length",
        "locals",
        "means",
        "name",
        "param",
        "rest",
        "rest_line",
    )

    def __init__(self, param: Tensor, name: str) -> None:
        self.param = param
        self.name = name
        self.keeps_bits = False
        self.dropped: list[int] = []
        self._seen: ref[Tensor] | None = None
        self._count = 0
        self.forget()

    def forget(self) -> None:
        """Count from now on, since what happened is not known."""
        self.means = self.locals = self.rest = self.changed = self.length = 0
        self.rest_line = ""
        self.bits: Tensor | None = None
        self._stepped = False
        self._mark()

    def _mark(self) -> None:
        grad = self.param.grad
        if grad is None:
            self._seen = None
        else:
            self._seen, self._count = ref(grad), grad._version

    def _is_as_marked(self, grad: Tensor) -> bool:
        return self._seen is not None and self._seen() is grad and grad._version == self._count

    def backward_begins(self) -> None:
        """Look what other code has done since the last backward."""
        grad = self.param.grad
        if grad is None:
            if self.length or self.means or self.locals:
                self._zeroed()
            self._seen = None
        elif not self._is_as_marked(grad):
            self._look_at(grad)

    def _look_at(self, grad: Tensor) -> None:
        same = self._seen is not None and self._seen() is grad
        # Whether it was zeroed or only scaled, its values tell. Those on a GPU would have to be waited for.
        if grad.is_cuda or not same or not grad.any():
            self._zeroed()
        elif not self._stepped and self.length:
            self.changed += 1
        self._mark()

    def _zeroed(self) -> None:
        if self.length and not self._stepped:
            self.dropped.append(self.length)
        self.means = self.locals = self.rest = self.length = 0
        self.bits = None

    def local_ends(self, *, announced: bool) -> None:
        """Note the end of a backward that was not averaged; `announced` says that it went through an output."""
        grad = self.param.grad
        if grad is None or self._is_as_marked(grad):
            return
        self._mark()
        self._begin_window()
        if announced:
            self.locals += 1
            if self.means:
                self.rest += 1
                self.rest_line = user_line()
        if self.rest or self.keeps_bits:
            self.bits = sample_of(grad)

    def mean_ends(self) -> None:
        """Note the end of a synchronised backward."""
        self._mark()
        if self._seen is None:
            return
        self._begin_window()
        self.means += 1
        self.rest = 0
        self.bits = None

    def _begin_window(self) -> None:
        if self._stepped:
            self._stepped, self.length, self.changed = False, 0, 0
        self.length += 1

    def stepped(self) -> None:
        """Note that an optimizer steps on it."""
        self._stepped = True
        self.dropped = []

    @property
    def was_kept(self) -> bool:
        """Whether its values are those of the last backward, or these times one number, or cut at one value.

        An average over the ranks, or noise, is another change. It waits for the device.
        """
        grad = self.param.grad
        return grad is not None and self.bits is not None and only_rescaled(self.bits.cpu(), sample_of(grad).cpu())


def sample_of(tensor: Tensor) -> Tensor:
    """Return a copy of some elements, [at most 64], from all parts of a dense tensor. The host does not wait."""
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // ELEMENTS)][:ELEMENTS].clone()


def only_rescaled(before: Tensor, now: Tensor) -> bool:
    """Whether `now` is `before`, or that times one number, or that cut at one absolute value: what clipping does.

    Args:
        before, now: [n], on the CPU.

    Returns:
        False where the values cannot tell that from an average over ranks, since few of them differ.

    Example:
        >>> import torch
        >>> before = torch.tensor([1.0, -2.0, 4.0, 0.0])
        >>> only_rescaled(before, before / 3), only_rescaled(before, before.clamp(-1.5, 1.5))
        (True, True)
        >>> only_rescaled(before, (before + torch.tensor([4.0, -2.0, 1.0, 0.0])) / 2)
        False
    """
    if torch.equal(before, now):
        return True
    tolerance = 8 * torch.finfo(now.dtype).eps
    before, now = before.double(), now.double()
    sizes, new_sizes = before.abs(), now.abs()
    if len(sizes[sizes > 0].unique()) < 3 or not (new_sizes.isfinite().all() and new_sizes.any()):
        return False
    place = int(sizes.argmax())
    factor = now[place] / before[place]
    if factor > 0 and bool(((now - factor * before).abs() <= tolerance * factor * sizes[place]).all()):
        return True
    limit = new_sizes.max()
    cut = (new_sizes == limit) & (sizes >= limit) & (now.sign() == before.sign())
    return bool((cut | (now == before)).all())
