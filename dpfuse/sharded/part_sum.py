"""The first half of an all-reduce: each rank receives the sum of its part of a buffer."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from dpfuse.engine import collective
from dpfuse.engine.protocols import Exchange
from dpfuse.engine.waiting import NO_LIMIT
from dpfuse_kernels import sum_parts

__all__ = ["Incoming", "PartSum"]


class Incoming:
    """Memory for what other ranks send, shared by all buckets of a model.

    Before new memory is taken, the oldest bucket that has landed is added up, and its memory is used again. So a fast
    network needs the memory of few buckets.
    """

    def __init__(self) -> None:
        self._idle: list[Tensor] = []  # [bytes] uint8, all of the size of the largest bucket so far
        self._nbytes = 0
        self._flying: deque[_PartWork] = deque()

    def receive(self, flat: Tensor, group: dist.ProcessGroup) -> dist.Work:
        """Start to exchange the parts of `flat`, and return the work whose wait adds them up."""
        while self._flying and self._flying[0].is_completed():
            with suppress(RuntimeError):  # its own wait raises this again
                self._flying.popleft().wait()
        if flat.nbytes > self._nbytes:
            self._idle, self._nbytes = [], flat.nbytes
        memory = self._idle.pop() if self._idle else torch.empty(self._nbytes, dtype=torch.uint8, device=flat.device)
        work = _PartWork(flat, memory, group, self)
        self._flying.append(work)
        return work

    def give_back(self, memory: Tensor) -> None:
        """Use this memory for the next bucket."""
        if memory.nbytes == self._nbytes:
            self._idle.append(memory)


class PartSum(Exchange):
    """All-to-all of parts, and a sum in the order of the ranks. The rest of the buffer keeps this rank's own numbers.

    On gloo this is faster than its reduce-scatter, and no bit depends on the layout of the bucket.

    Args:
        group: the ranks; the buffer has the same number of elements for each of them.
        incoming: memory for the parts.
    """

    def __init__(self, group: dist.ProcessGroup, incoming: Incoming) -> None:
        super().__init__(group)
        self._incoming = incoming

    def start(self, flat: Tensor) -> dist.Work:
        return self._incoming.receive(flat, self.group)


class _PartWork(dist.Work):
    """Args: the buffer, [ranks * part], memory for as much, the ranks, and what gets the memory back."""

    def __init__(self, flat: Tensor, memory: Tensor, group: dist.ProcessGroup, incoming: Incoming) -> None:
        super().__init__()
        self._flat = flat
        self._memory: Tensor | None = memory
        self._group = group
        self._incoming = incoming
        self._future: Future[Any] = Future()
        self._parts = memory[: flat.nbytes].view(flat.dtype)
        self._exchange = collective.start_all_to_all(self._parts, flat, group)

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait for the parts, and add them up; it can be called again."""
        if self._memory is None:
            return True
        self._exchange.wait(timeout)
        size = self._group.size()
        sum_parts(self._parts.view(size, -1), self._flat.view(size, -1)[self._group.rank()])
        self._incoming.give_back(self._memory)
        self._memory = None
        del self._parts
        self._future.set_result([self._flat])
        return True

    def is_completed(self) -> bool:
        """Whether a wait returns or raises at once."""
        return self._memory is None or self._exchange.is_completed()

    def get_future(self) -> Future[Any]:
        """Return a future that is done when this was waited for."""
        return self._future
