"""The sum over all micro-batches in one fixed binary tree: no bit depends on the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.comm import collective
from dpfuse.comm.work import StagedWork
from dpfuse.engine.micro_batches import Stack
from dpfuse.engine.protocols import Exchange
from dpfuse.engine.streams import new_stream
from dpfuse.engine.subtrees import Subtrees

__all__ = ["Cut", "TreeSum"]


class Cut(Protocol):
    """Neighbouring elements of a communication buffer, and which rank has which of them."""

    @property
    def bounds(self) -> Sequence[int]:
        """Where the part of each rank begins in the buffer, and where that of the last one ends, in elements."""

    @property
    def lengths(self) -> Sequence[int]:
        """The elements of each rank's part."""


@dataclass(frozen=True)
class _Equal:
    """A buffer in equal parts."""

    numel: int
    ranks: int

    @property
    def bounds(self) -> Sequence[int]:
        return [self.numel // self.ranks * rank for rank in range(self.ranks + 1)]

    @property
    def lengths(self) -> Sequence[int]:
        return [self.numel // self.ranks] * self.ranks


class TreeSum(Exchange):
    """Each rank sends the parts of its subtrees to their owners, which finish the tree; then all gather the means.

    For each subtree a rank sends as many bytes as in a reduce-scatter of the sums' dtype. A mean is divided once, by
    the number of micro-batches, and rounded once to the dtype of the gradients.

    Args:
        group: the ranks.
        subtrees: of this rank, for one bucket. They travel in place of the communication buffer.
        room: elements of the report at the end of the buffer, whose sum is not divided.
        cuts: the parts of the ranks, which are not gathered; None gathers equal parts.
    """

    takes_factors = False

    def __init__(
        self, group: dist.ProcessGroup, subtrees: Subtrees, room: int = 0, cuts: Sequence[Cut] | None = None
    ) -> None:
        super().__init__(group)
        self._subtrees = subtrees
        self._room = room
        self._cuts = cuts
        self._received: list[list[Tensor]] | None = None
        self._nodes = [subtrees.deal.subtrees(rank) for rank in range(group.size())]
        most = max(map(len, self._nodes))
        self._senders = [[rank for rank, own in enumerate(self._nodes) if len(own) > place] for place in range(most)]
        self._stream: torch.cuda.Stream | None = None

    def divided(self, cuts: Sequence[Cut]) -> TreeSum:
        """Return an exchange after which each rank has its own parts only."""
        return TreeSum(self.group, self._subtrees, cuts=cuts)

    def empty(self, scale: float) -> None:
        for node in self._subtrees.nodes:
            node.zero_()

    def start(self, flat: Tensor) -> dist.Work:
        if self._stream is None:
            self._stream = new_stream(flat.device)
        self._subtrees.close()
        nodes, rank, size = self._subtrees.nodes, self.group.rank(), self.group.size()
        cuts: Sequence[Cut] = [_Equal(flat.numel(), size)] if self._cuts is None else self._cuts
        if self._room:
            self._subtrees.put_behind(flat[flat.numel() - self._room :])
        if self._received is None and size == 1:  # what it sends to itself stays where it is
            self._received = [[node[cut.bounds[0] : cut.bounds[-1]] for cut in cuts] for node in nodes]
        elif self._received is None:
            with torch.inference_mode(False):  # what is made there cannot be written outside of it
                self._received = [
                    [nodes[0].new_empty(len(senders) * cut.lengths[rank]) for cut in cuts] for senders in self._senders
                ]
        stages = self._stages(flat, nodes, cuts, self._received)
        return StagedWork(stages, 1 + (self._cuts is None), device=flat.device)

    def started(self, work: dist.Work) -> None:
        # On CUDA all that follows is queued at once. On a CPU the wait does it.
        assert isinstance(work, StagedWork)
        if self._stream is not None:
            work.go_on_on(self._stream)

    def _stages(
        self, flat: Tensor, nodes: list[Tensor], cuts: Sequence[Cut], received: list[list[Tensor]]
    ) -> Iterator[dist.Work]:
        """Exchange the nodes, which come to `received`; the means come to `flat`."""
        rank = self.group.rank()
        nothing = nodes[0][:0]

        def start() -> Iterator[dist.Work]:
            for place, senders in enumerate(self._senders):
                for cut, parts in zip(cuts, received[place], strict=True):
                    own = nodes[place][cut.bounds[0] : cut.bounds[-1]] if rank in senders else nothing
                    equal = len(senders) == self.group.size() and len({*cut.lengths}) == 1  # one call of NCCL
                    lengths, those = ((), ()) if equal else (cut.lengths, senders)
                    yield collective.start_all_to_all(parts, own, self.group, lengths, those)

        yield collective.together(start())
        for cut, *parts in zip(cuts, *received, strict=True):
            length = cut.lengths[rank]
            rows = [each.view(len(senders), length) for each, senders in zip(parts, self._senders, strict=True)]
            ours = flat[cut.bounds[rank] : cut.bounds[rank + 1]]
            last = min(cut.bounds[rank + 1], flat.numel() - self._room)
            self._finish_tree(rows, ours, max(0, last - cut.bounds[rank]))
        if self._cuts is None:
            yield collective.start_all_gather_into(flat, ours, self.group)

    def _finish_tree(self, received: list[Tensor], ours: Tensor, divided: int) -> None:
        """Add up what was received in the order of the tree, and write the mean of this part to `ours`.

        Args:
            received: of each place, [ranks that have so many subtrees, elements].
            ours: [elements].
            divided: how many of them are divided; the rest is of the report.
        """
        stack, sums = Stack(self._subtrees.deal.count), []
        for rank, own in enumerate(self._nodes):
            for place, node in enumerate(own):
                sums.append(received[place][self._senders[place].index(rank)])
                for _ in range(stack.push(node)):
                    right = sums.pop()
                    sums[-1].add_(right)
        (total,) = sums
        torch.div(total[:divided], self._subtrees.deal.count, out=ours[:divided])
        ours[divided:] = total[divided:]
