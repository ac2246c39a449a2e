"""What has happened to the gradient of one parameter since it was zero. It is hardly ever read, only looked at."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpfuse.engine.gradient_change import Change, change_of
from dpfuse.engine.sample import Sample, are_comparable, sample_of, values_of
from dpfuse.engine.user_line import user_line

__all__ = ["WatchedGradient", "has_plain_class"]


class WatchedGradient:
    """Counts the backwards that have written one gradient, and notices when other code zeroes it.

    Which tensor `.grad` is, and torch's count of writes, tell that without a look at a value. Another tensor that got
    the same place in memory may be taken for it. That is no harm: what is seen here is only a suspicion.

    Args:
        param: whose gradient is watched, dense.
        name: of the parameter.
        rank: of this process, for messages.

    Attributes:
        has_mean: whether a synchronised backward has ended since it was zero, as far as averages are told.
        locals: how many others have written it since then, through an output of the wrapper.
        rest: how many of these came after the last synchronised one.
        rest_line: the user's line of the last of them.
        bits: a copy of a few elements after each backward that was not averaged, where `rest` is above 0.
        length: how many backwards have written it since the last step, or since it was zero, as far as they are told.
        has_stepped: whether an optimizer has stepped on it since then, so that its values tell whether it was zeroed.
        averages: how many backwards were synchronised when it was marked or stepped on last.
    """

    __slots__ = (
        "_count", "_seen", "averages", "bits", "has_mean", "has_stepped", "length", "locals", "name", "param", "rank",
        "rest", "rest_line",
    )  # fmt: skip

    def __init__(self, param: Tensor, name: str, rank: int) -> None:
        self.param = param
        self.name = name
        self.rank = rank
        self._seen = self._count = self.averages = 0  # the id of the gradient, and its count of writes
        self.forget()

    def forget(self) -> None:
        """Count from now on, since what happened is not known."""
        self._restart()
        self.rest_line = ""
        self.has_stepped = False
        self._mark(self.param.grad)

    def _restart(self) -> None:
        self.has_mean = False
        self.locals = self.rest = self.length = 0
        self.bits: Sample | None = None

    def _mark(self, grad: Tensor | None) -> None:
        if grad is None or grad.is_inference():  # which has no count of writes
            self._seen = 0
        else:
            self._seen, self._count = id(grad), grad._version

    def backward_begins(self, *, announced: bool) -> None:
        """Look whether other code has zeroed it since the last backward.

        A backward that no output has `announced` may have written the gradient before this is called.
        """
        grad = self.param.grad
        if grad is None or id(grad) != self._seen:
            self._restart()
        # `grad.data` can be written without a count. So after a step, where most programs zero, values decide.
        elif announced and (self.has_stepped or grad._version != self._count):
            if not self._is_readable(grad) or not grad.any():
                self._restart()
        else:
            return
        self._mark(grad)

    @staticmethod
    def _is_readable(grad: Tensor) -> bool:
        """Whether the host need not wait for its values."""
        return grad.is_cpu

    def local_ends(self, *, announced: bool) -> None:
        """Note the end of a backward that was not averaged; `announced` says that it went through an output."""
        grad = self.param.grad
        if grad is None or grad.layout is not torch.strided:
            return
        if id(grad) == self._seen and grad._version == self._count:
            return  # it was not written
        self._mark(grad)
        self._written()
        if announced:
            self.locals += 1
            if self.has_mean:
                self.rest += 1
                self.rest_line = user_line()
        if self.rest:
            self.bits = sample_of(grad)

    def mean_ends(self, averages: int) -> None:
        """Note the end of a synchronised backward; with it there are so many."""
        grad, self.averages = self.param.grad, averages
        self._mark(grad)
        if grad is not None:
            self._written()
            self.has_mean, self.rest, self.bits = True, 0, None

    def catch_up(self, averages: int, *, announced: bool) -> None:
        """Take the gradient for what the last of so many averages has left, since their ends were not told.

        A backward begins. Where it has no output that has `announced` it, it may have written the gradient. Other code
        may have zeroed the gradient since the average. Its values tell that, unless the host has to wait for them.
        """
        is_stepped_on, grad = self.averages == averages, self.param.grad
        self.averages = averages
        if not announced or grad is None or not (is_stepped_on or self._is_readable(grad)):
            self.forget()
            return
        self.mean_ends(averages)
        self.has_stepped = True  # so that values decide

    def _written(self) -> None:
        self.length = 1 if self.has_stepped else self.length + 1
        self.has_stepped = False

    @property
    def was_kept(self) -> bool:
        """Whether its values are those of the last backward, but for factors, cuts and masks. It waits for the device.

        An average over the ranks, or noise, is another change.
        """
        grad, bits = self.param.grad, self.bits
        if grad is None or bits is None:
            return False
        now = sample_of(grad)
        if not are_comparable(bits, now):
            return False
        return change_of(values_of(bits).cpu(), values_of(now).cpu()) is not Change.OTHER


def has_plain_class(tensor: Tensor) -> bool:
    """Whether this is torch's own class: another one may have its elements elsewhere, or on several ranks."""
    return type(tensor) in (Tensor, nn.Parameter)
