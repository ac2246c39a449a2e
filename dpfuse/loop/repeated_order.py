"""The rule of DPF-L11: a sampler that is to shuffle gives the same order in each epoch."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from ctypes import string_at
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from dpfuse.engine.containers import tensors_in
from dpfuse.findings import SAME_ORDER, findings

__all__ = ["RepeatedOrder"]

BATCHES = 8  # in a row, that came in the same order before
BYTES = 64  # of the first input, that are compared
FORWARDS = 16  # of one batch in a row, of which more show that it is repeated on purpose


class RepeatedOrder:
    """Keeps a few bytes of the first batches, and notices when they come again in the same order.

    Many programs repeat batches on purpose. So something is said only if there is a `DistributedSampler` that shuffles,
    and whose epoch has as many batches as came before they were repeated. A sampler of another data set, such as that
    for validation, seldom has. Inputs on a GPU cannot be read without waiting, and are left alone.

    Attributes:
        decided: whether no batch needs to be compared any more.
    """

    def __init__(self) -> None:
        self.decided = False
        self._first: list[bytes] = []
        self._batch_size = 0
        self._count = 0  # batches so far
        self._last = b""  # of the batch before
        self._again = 0  # forwards that it has had beyond the first
        self._same = 0  # in a row that are those of the beginning
        self._repeats = False

    def forward_begins(self, inputs: tuple[Sequence[Any], Mapping[str, Any]]) -> None:
        """Compare the first tensor of these arguments of a forward."""
        if self.decided:
            return
        args = inputs[0]
        tensor = args[0] if args and type(args[0]) is Tensor else next(iter(tensors_in(inputs)), None)
        if tensor is None or not readable(tensor):
            self.decided = True
            return
        key, first = some_bytes(tensor), self._first
        if key == self._last:  # a batch may have several forwards, as in R-Drop and SAM
            self._again += 1
            self.decided = self._again == FORWARDS
            return
        self._last, self._again = key, 0
        self._count += 1
        if not first:
            self._batch_size = tensor.shape[0] if tensor.ndim else 1
        if len(first) < BATCHES:
            self.decided = key in first  # equal batches, or a part that is the same in all
            first.append(key)
        elif key == first[self._same]:
            self._same += 1
            self._repeats = self.decided = self._same == BATCHES
        else:
            self._same = int(key == first[0])

    def tell(self, rank: int) -> None:
        """Say what was found."""
        if not self._repeats:
            return
        epoch = self._count - BATCHES
        objects = gc.get_objects()
        samplers = [each for each in objects if issubclass(type(each), DistributedSampler)]
        loaders = [each for each in objects if issubclass(type(each), DataLoader)]
        for sampler in samplers:
            lengths = [len(loader) for loader in loaders if any(each is sampler for each in samplers_of(loader))]
            lengths += [len(sampler) // self._batch_size, -(-len(sampler) // self._batch_size)]
            if sampler.shuffle and sampler.num_replicas > 1 and epoch in lengths:
                findings.note(
                    SAME_ORDER,
                    rank,
                    f"rank {rank}: the last {BATCHES} batches were the first {BATCHES} of the training, in the same "
                    f"order. A DistributedSampler with shuffle=True has as many batches as came in between, {epoch}. "
                    f"Its epoch is {sampler.epoch}, and the order depends on it. Expected another order in each epoch: "
                    "call sampler.set_epoch(epoch) before each.",
                )


def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """Return the samplers from which a loader has its order."""
    return [loader.sampler, getattr(loader.batch_sampler, "sampler", None)]


def readable(tensor: Tensor) -> bool:
    """Whether the bytes of a tensor can be read at its address."""
    plain = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.layout is torch.strided
    return plain and tensor.is_contiguous() and tensor.numel() > 0 and tensor.data_ptr() != 0


def some_bytes(tensor: Tensor) -> bytes:
    """Return bytes from the inside of a tensor: its begin may be a border, or a token that all batches have."""
    nbytes = tensor.numel() * tensor.element_size()
    count = min(BYTES, nbytes)
    start = min(nbytes * 3 // 7, nbytes - count)
    return string_at(tensor.data_ptr() + start, count)
