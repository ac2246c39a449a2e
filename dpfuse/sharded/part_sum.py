"""The first half of an all-reduce: each rank receives the sum of its part of a communication buffer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.comm import collective
from dpfuse.comm.failed import mark
from dpfuse.comm.work import StagedWork
from dpfuse.engine.protocols import Exchange
from dpfuse.sharded.division import Region
from dpfuse_kernels import sum_parts

__all__ = ["Incoming", "PartSum"]


class Incoming:
    """Memory for what other ranks send, shared by all buckets of a model.

    Before new memory is taken, the oldest bucket that has landed is added up, and its memory is used again. So a fast
    network needs the memory of few buckets.

    Args:
        scatters: whether equal parts are added up by the back end, in their places, and need no memory.
    """

    def __init__(self, *, scatters: bool) -> None:
        self._scatters = scatters
        self._idle: list[Tensor] = []  # [bytes] uint8, all of the size that the largest bucket so far needs
        self._nbytes = 0
        self._flying: deque[StagedWork] = deque()

    def receive(self, flat: Tensor, regions: Sequence[Region], group: dist.ProcessGroup) -> dist.Work:
        """Start to exchange the parts of `flat`, and return the work whose wait adds them up."""
        while self._flying and self._flying[0].is_completed():
            with suppress(RuntimeError):  # its own wait raises this again
                self._flying.popleft().wait()
        size, rank = group.size(), group.rank()
        received = (region.lengths[rank] for region in regions if region.whole or not self._scatters)
        nbytes = size * sum(received) * flat.element_size() if size > 1 else 0
        if nbytes > self._nbytes:
            self._idle, self._nbytes = [], nbytes
        memory = self._idle.pop() if self._idle else torch.empty(self._nbytes, dtype=torch.uint8, device=flat.device)
        work: StagedWork | None = None
        try:
            work = StagedWork(self._stages(flat, regions, memory, group), device=flat.device)
            self._flying.append(work)
            return work
        except BaseException as error:
            if work is not None:
                mark(error)  # it has begun
            raise

    def _stages(
        self, flat: Tensor, regions: Sequence[Region], memory: Tensor, group: dist.ProcessGroup
    ) -> Iterator[dist.Work]:
        """Exchange the parts, which come to `memory`; add them up, and keep the memory for the next bucket."""
        size, rank = group.size(), group.rank()
        sums: list[tuple[Tensor, Tensor]] = []  # what each rank has sent here, [ranks, part], and the part

        def start() -> Iterator[dist.Work]:
            begin = 0
            for region in regions:
                own = flat[region.bounds[rank] : region.bounds[rank + 1]]
                if self._scatters and not region.whole:
                    yield collective.start_reduce_scatter(own, flat[region.begin : region.end], group)
                    continue
                sent = flat[region.begin : region.end]
                end = begin + size * region.lengths[rank] * flat.element_size() if size > 1 else begin
                parts = memory[begin:end].view(flat.dtype) if size > 1 else sent  # one rank has nothing to add up
                yield collective.start_all_to_all(parts, sent, group, region.lengths if region.whole else ())
                if begin < end:
                    sums.append((parts.view(size, -1), own))
                begin = end

        yield collective.together(start())
        for parts, own in sums:
            sum_parts(parts, own)
        if memory.nbytes == self._nbytes:
            self._idle.append(memory)


class PartSum(Exchange):
    """Each rank gets the sum of its part of a buffer. The rest of the buffer keeps this rank's own numbers.

    An all-to-all of parts and a sum in the order of the ranks: on gloo this is faster than its reduce-scatter, and no
    bit depends on the layout of the bucket. NCCL scatters equal parts.

    Args:
        regions: of the buffer; each travels in a collective of its own.
    """

    def __init__(self, group: dist.ProcessGroup, regions: Sequence[Region], incoming: Incoming) -> None:
        super().__init__(group)
        self._regions = regions
        self._incoming = incoming

    def start(self, flat: Tensor) -> dist.Work:
        return self._incoming.receive(flat, self._regions, self.group)
