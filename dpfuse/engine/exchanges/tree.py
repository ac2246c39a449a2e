"""The sum over all micro-batches in one fixed binary tree: no bit depends on the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.comm import collective
from dpfuse.comm.work import StagedWork
from dpfuse.engine.micro_batches import Stack
from dpfuse.engine.protocols import Exchange
from dpfuse.engine.streams import new_stream
from dpfuse.engine.subtrees import Subtrees

__all__ = ["TreeSum"]


class TreeSum(Exchange):
    """Each rank sends the parts of its subtrees to their owners, which finish the tree; then all gather the means.

    For each subtree a rank sends as many bytes as in a reduce-scatter of the sums' dtype. A mean is divided once, by
    the number of micro-batches, and rounded once to the dtype of the gradients.

    Args:
        group: the ranks.
        subtrees: of this rank, for one bucket. They travel in place of the communication buffer.
    """

    takes_factors = False

    def __init__(self, group: dist.ProcessGroup, subtrees: Subtrees) -> None:
        super().__init__(group)
        self._subtrees = subtrees
        nodes = [subtrees.deal.subtrees(rank) for rank in range(group.size())]
        most = max(map(len, nodes))
        self._senders = [[rank for rank, own in enumerate(nodes) if len(own) > place] for place in range(most)]
        self._nodes = nodes
        self._stream: torch.cuda.Stream | None = None

    def empty(self) -> None:
        for node in self._subtrees.nodes:
            node.zero_()

    def start(self, flat: Tensor) -> dist.Work:
        if self._stream is None:
            self._stream = new_stream(flat.device)
        self._subtrees.close()
        nodes = self._subtrees.nodes
        part, received = flat.numel() // self.group.size(), []
        for senders in self._senders:  # here, since nothing may fail between the collectives
            received.append(nodes[0].new_empty(len(senders) * part))
        return StagedWork(self._stages(flat, nodes, received, part), len(self._senders) + 1)

    def started(self, work: dist.Work) -> None:
        # On CUDA all that follows is queued at once. On a CPU the wait does it.
        assert isinstance(work, StagedWork)
        if self._stream is not None:
            work.go_on_on(self._stream)

    def _stages(self, flat: Tensor, nodes: list[Tensor], received: list[Tensor], part: int) -> Iterator[dist.Work]:
        """Exchange the nodes, [ranks * part] each; one after the other comes to `received`. Gather means in `flat`."""
        rank, size = self.group.rank(), self.group.size()
        nothing = nodes[0][:0]
        for place, senders in enumerate(self._senders):
            own = nodes[place] if rank in senders else nothing
            yield collective.start_all_to_all(received[place], own, self.group, [part] * size, senders)
        ours = flat.view(size, -1)[rank]
        self._finish_tree([sent.view(-1, part) for sent in received], ours)
        yield collective.start_all_gather_into(flat, ours, self.group)

    def _finish_tree(self, received: list[Tensor], ours: Tensor) -> None:
        """Add up what was received in the order of the tree, and write the mean of this part to `ours`."""
        stack, sums = Stack(self._subtrees.deal.count), []
        for rank, own in enumerate(self._nodes):
            for place, node in enumerate(own):
                sums.append(received[place][self._senders[place].index(rank)])
                for _ in range(stack.push(node)):
                    right = sums.pop()
                    sums[-1].add_(right)
        (total,) = sums
        ours.copy_(total.div_(self._subtrees.deal.count))
