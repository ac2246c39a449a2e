"""What has happened to the gradient of one parameter since it was zero. It is hardly ever read, only looked at."""

from __future__ import annotations

from ctypes import string_at
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dpfuse.engine.streams import HostCopy, capturing
from dpfuse.engine.torch_private import TensorMark
from dpfuse.engine.user_line import user_line

__all__ = [
    "Sample",
    "WatchedGradient",
    "are_comparable",
    "is_plain",
    "only_rescaled",
    "rounding_of",
    "sample_of",
    "values_of",
]

ELEMENTS = 64  # that are copied, where the bits of a gradient are compared
TINY = 1e-30  # below which a product may have been rounded to nothing


class Sample(NamedTuple):
    """A copy of a few elements of a tensor, which the program may convert or move before the next copy."""

    memory: Tensor | bytes  # on a CPU mostly bytes
    dtype: torch.dtype


class WatchedGradient:
    """Counts the backwards that have written one gradient, and notices when other code zeroes or changes it.

    Which tensor `.grad` is, and torch's count of writes, tell that without a look at a value.

    Args:
        param: whose gradient is watched, dense.
        name: of the parameter.
        rank: of this process, for messages.

    Attributes:
        means: how many synchronised backwards have written it since it was zero.
        locals: how many others have, through an output of the wrapper.
        rest: how many of these came behind the last synchronised one.
        rest_line: the user's line of the last of them.
        keeps_bits: how many rules want a copy of a few elements behind each backward that was not averaged. Without
            any there is one where `rest` is above 0.
        bits: that copy.
        length: how many backwards have written it since the last step, or since it was zero.
        compares: whether values that other code may have written between two backwards are compared with that copy,
            of which there is one behind synchronised backwards, too.
        changes: how often other code has scaled or cut it there, before a backward that added to it, since the last
            step.
        touched: whether other code may have written it there, at any time.
        dropped: how many backwards had written it each time it was zeroed without a step, since the last step.
        odd: whether anything was seen since the last step but backwards that add up, the synchronised one last.
    """

    __slots__ = (
        "_count",
        "_looks",
        "_pending",
        "_seen",
        "_stepped",
        "bits",
        "changes",
        "compares",
        "dropped",
        "keeps_bits",
        "length",
        "locals",
        "means",
        "name",
        "odd",
        "param",
        "rank",
        "rest",
        "rest_line",
        "touched",
    )

    def __init__(self, param: Tensor, name: str, rank: int) -> None:
        self.param = param
        self.name = name
        self.rank = rank
        self.keeps_bits = 0
        self.compares = self.touched = False
        self._seen: TensorMark | None = None
        self._count = 0
        self._looks: list[tuple[HostCopy, float]] = []  # on a GPU, where such writes are judged behind the step
        self.forget()

    def forget(self) -> None:
        """Count from now on, since what happened is not known."""
        self.means = self.locals = self.rest = self.changes = self.length = 0
        self.dropped: list[int] = []
        self.rest_line = ""
        self.bits: Sample | None = None
        self._stepped = False
        self.odd = True
        # Before and behind each write of other code that no backward has followed which adds to it.
        self._pending: list[tuple[Sample, Sample]] = []
        self._mark()

    def _mark(self) -> None:
        grad = self.param.grad
        if grad is None or grad.is_inference():  # which has no count of writes
            self._seen = None
        else:
            self._see(grad)

    def _see(self, grad: Tensor) -> None:
        if self._seen is None or not self._seen.is_of(grad):
            self._seen = None if grad.layout is not torch.strided else TensorMark(grad)
        self._count = grad._version

    def backward_begins(self, *, announced: bool) -> None:
        """Look what other code has done since the last backward.

        A backward that no output has `announced` may have written the gradient before this is called.
        """
        grad = self.param.grad
        if grad is None:
            if self.length or self.means:
                self._zeroed()
            self._seen = None
        elif self._seen is None or not self._seen.is_of(grad):
            self.odd = True
            self._restart()  # of which nothing is known
            self._mark()
        # `grad.data` can be written without a count. So behind a step, where most programs zero, values decide.
        elif announced and (self._stepped or grad._version != self._count or (self.compares and self._differs(grad))):
            self._may_be_written(grad)
            self._mark()

    def _differs(self, grad: Tensor) -> bool:
        """Whether a sample of its memory shows that other code has written it, though it did not count."""
        bits = self.bits
        return bits is not None and type(bits.memory) is bytes and bits != sample_of(grad)

    @staticmethod
    def _is_readable(grad: Tensor) -> bool:
        """Whether the host need not wait for its values."""
        return grad.is_cpu

    def _may_be_written(self, grad: Tensor) -> None:
        is_readable = self._is_readable(grad)
        if is_readable and not grad.any():
            self._zeroed()
            return
        write = None
        if self.length > 0 and not self._stepped and not capturing():
            self.touched = self.odd = True
            now = sample_of(grad)
            if self.compares and self.bits is not None and are_comparable(self.bits, now):
                write = self.bits, now
        if not is_readable:
            self._restart()  # it may be zero
        if write is not None:
            self._pending.append(write)

    def _count_changes(self, grad: Tensor) -> None:
        """Count what other code has changed, if the backward that has ended has added to it: it may be of another loss.

        On a GPU the values would have to be waited for. They are read after the next step.
        """
        end = sample_of(grad)
        writes = [(before, now, end) for before, now in self._pending if are_comparable(now, end)]
        if not writes:
            return
        values = torch.stack([values_of(sample).double() for write in writes for sample in write])
        if self._is_readable(grad):
            if not were_added_to(values[-2], values[-1]):
                return
            self.changes += were_rescaled(values, rounding_of(grad))
        else:
            self._looks.append((HostCopy(values), rounding_of(grad)))
        self._pending.clear()

    def _zeroed(self) -> None:
        if not self._stepped:
            self.dropped.append(self.length)
            self.odd = True
        self.means = self.locals = self.rest = self.length = 0
        self.bits = None
        if self._pending:
            self._pending.clear()

    def _restart(self) -> None:
        self.means = self.locals = self.rest = self.length = 0
        self.bits = None
        self._pending.clear()

    def local_ends(self, *, announced: bool) -> None:
        """Note the end of a backward that was not averaged; `announced` says that it went through an output."""
        grad = self.param.grad
        if grad is None or grad.layout is not torch.strided:
            return
        if self._seen is None or not self._seen.is_of(grad):
            self._mark()
        elif grad._version == self._count:
            return
        else:
            self._count = grad._version
        if self._pending:
            self._count_changes(grad)
        if self._stepped:
            self._stepped, self.length = False, 1
        else:
            self.length += 1
        if announced:
            self.locals += 1
            if self.means:
                self.rest += 1
                self.odd = True
                self.rest_line = user_line()
        if self.rest or self.keeps_bits:
            self.bits = sample_of(grad)

    def mean_ends(self) -> None:
        """Note the end of a synchronised backward."""
        grad = self.param.grad
        if grad is None or grad.is_inference():
            self._seen = None
            return
        self._see(grad)
        if self._pending and grad.layout is torch.strided:
            self._count_changes(grad)
        if self._stepped:
            self._stepped, self.length = False, 1
        else:
            self.length += 1
        self.means += 1
        self.rest = 0
        self.bits = None
        if self.compares and grad.layout is torch.strided:
            self.bits = sample_of(grad)

    @property
    def is_new(self) -> bool:
        """Whether a backward has written it since the last step."""
        return self.length > 0 and not self._stepped

    def stepped(self) -> None:
        """Note that an optimizer steps on it, once the rules have looked."""
        self._stepped = True
        self.changes = 0
        self.dropped.clear()
        self._pending.clear()
        if self._looks:
            looks, self._looks = self._looks, []
            for look, tolerance in looks:
                self.changes += were_rescaled(torch.tensor(look.read(), dtype=torch.float64, device="cpu"), tolerance)
        self.odd = self.changes > 0

    def stepped_as_before(self, length: int) -> bool:
        """Note such a step, if its window has one average, behind `length - 1` others, and nothing else was seen.

        Returns:
            Whether that is so. Else `stepped` notes the step.
        """
        if self.odd or self._stepped or self.length != length or self.means != 1 or self.param.grad is None:
            return False
        if self.rest or self.locals != length - 1:
            return False
        self._stepped = True
        return True

    @property
    def was_kept(self) -> bool:
        """Whether its values are those of the last backward, or these times one number, or cut at one value.

        An average over the ranks, or noise, is another change. It waits for the device.
        """
        grad, bits = self.param.grad, self.bits
        if grad is None or bits is None:
            return False
        now = sample_of(grad)
        return are_comparable(bits, now) and only_rescaled(values_of(bits).cpu(), values_of(now).cpu())


def is_plain(tensor: Tensor) -> bool:
    """Whether this is torch's own class: another one may have its elements elsewhere, or on several ranks."""
    return type(tensor) in (Tensor, nn.Parameter)


def sample_of(tensor: Tensor) -> Sample:
    """Return a copy of some elements, at most 64, of a dense tensor. The host does not wait."""
    if tensor.is_cpu and tensor.is_contiguous():  # ten times as fast as a copy by torch
        nbytes = min(tensor.nbytes, ELEMENTS * tensor.itemsize)
        return Sample(string_at(tensor.data_ptr(), nbytes), tensor.dtype)
    flat = tensor.detach().flatten()
    return Sample(flat[:: max(1, flat.numel() // ELEMENTS)][:ELEMENTS].clone(), tensor.dtype)


def values_of(sample: Sample) -> Tensor:
    """Return the elements, [at most 64], of a sample, on the device of its tensor."""
    memory, dtype = sample
    return memory if isinstance(memory, Tensor) else torch.frombuffer(bytearray(memory), dtype=dtype)


def are_comparable(before: Sample, now: Sample) -> bool:
    """Whether two samples of a tensor have as many elements, of one dtype, on one device."""
    if before.dtype is not now.dtype or len(before.memory) != len(now.memory):
        return False
    devices = {each.memory.device.type if isinstance(each.memory, Tensor) else "cpu" for each in (before, now)}
    return len(devices) == 1


def only_rescaled(before: Tensor, now: Tensor, tolerance: float | None = None) -> bool:
    """Whether `now` is `before`, or that times one number, or that cut at one absolute value: what clipping does.

    Args:
        before, now: [n], on the CPU.
        tolerance: of the factor, relative; None is that of their dtype.

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
    tolerance = tolerance or rounding_of(now)
    before, now = before.double(), now.double()
    sizes, new_sizes = before.abs(), now.abs()
    if len(sizes[sizes > 0].unique()) < 3 or not (new_sizes.isfinite().all() and new_sizes.any()):
        return False
    place = int(sizes.argmax())
    factor = now[place] / before[place]
    if factor > 0 and bool(((now - factor * before).abs() <= tolerance * factor * sizes + TINY).all()):
        return True
    limit = new_sizes.max()
    cut = (new_sizes == limit) & (sizes >= limit) & (now.sign() == before.sign())
    return bool((cut | (now == before)).all())


def were_rescaled(values: Tensor, tolerance: float) -> bool:
    """Whether other code has scaled or cut values before a backward that has added to them.

    Args:
        values: [3 * writes, n] float64: before other code has written them, behind it, and behind the backward.
        tolerance: of a factor, relative.
    """
    writes = values.view(-1, 3, values.shape[-1])
    return any(is_rescaled(before, now, tolerance) and were_added_to(now, end) for before, now, end in writes)


def is_rescaled(before: Tensor, now: Tensor, tolerance: float) -> bool:
    """Whether values were multiplied by one number, cut at one absolute value, or both, in this order.

    An addition gives the same after each batch as at the end, and so does a mask. So zeros are left out.

    Args:
        before, now: [n] float64, on the CPU.
        tolerance: of the factor, relative.

    Example:
        >>> import torch
        >>> before = torch.tensor([1.0, -2.0, 4.0, 3.0], dtype=torch.float64)
        >>> [is_rescaled(before, now, 1e-6) for now in (before / 3, (before / 2).clamp(-1.2, 1.2), before + 1, before)]
        [True, True, False, False]
    """
    kept = now != 0
    before, now = before[kept], now[kept]
    sizes, new_sizes = before.abs(), now.abs()
    if len(sizes.unique()) < 3 or not new_sizes.isfinite().all() or not torch.equal(before.sign(), now.sign()):
        return False
    below = new_sizes < new_sizes.max()
    factor = 1.0
    if len(new_sizes[below].unique()) > 1:  # of one value nothing is known but whether it was kept
        place = int(new_sizes.where(below, 0).argmax())
        factor = float(now[place] / before[place])
    scaled = factor * sizes
    fits = torch.where(
        below, (new_sizes - scaled).abs() <= tolerance * scaled + TINY, new_sizes <= scaled * (1 + tolerance)
    )
    shrunk = new_sizes < sizes * (1 - 2 * tolerance)
    return bool(fits.all()) and (abs(factor - 1) > 2 * tolerance or int(shrunk.sum()) > 1)


def were_added_to(now: Tensor, end: Tensor) -> bool:
    """Whether a backward has added to values: they are others behind it."""
    return not torch.equal(now, end)


def rounding_of(tensor: Tensor) -> float:
    """Return how far, relatively, a multiplication of numbers of this dtype may round."""
    return 4 * torch.finfo(tensor.dtype).eps
