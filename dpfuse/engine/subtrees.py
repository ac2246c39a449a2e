"""The sums of a rank's micro-batches: memory of nodes of the tree, in the layout of a bucket. Knows no parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpfuse.engine.comm_buffer import Zeros
from dpfuse.engine.micro_batches import MicroBatches, Node, Stack
from dpfuse_kernels import PointerTable, Slot

__all__ = ["Subtrees"]


class Subtrees:
    """The nodes that a rank holds of one bucket. They are added up in place, from left to right.

    Args:
        deal: of the micro-batches.
        rank: of this process.
        numel: elements of the bucket's communication buffer.
        slots: where the gradients lie in it.
        dtype: of the gradients. Sums are float64 for float64, else float32.
        zeros: allocates a flat tensor.

    Attributes:
        deal: of the micro-batches.
        leaf: where the gradients of the micro-batch that is open are to go, after `open`.
    """

    leaf: PointerTable

    def __init__(
        self, deal: MicroBatches, rank: int, numel: int, slots: Sequence[Slot], dtype: torch.dtype, zeros: Zeros
    ) -> None:
        self.deal = deal
        self._first = deal.of(rank).start
        self._count = len(deal.subtrees(rank))
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        self._tables = [PointerTable(zeros(numel, sums), slots, dtype) for _ in range(deal.most_nodes(rank))]
        self._stack = Stack(deal.count)
        self._next = self._first  # the micro-batch that is opened next
        self._open: Node | None = None
        self._joins = False

    @property
    def nodes(self) -> list[Tensor]:
        """What this rank sends once its last micro-batch is closed: as many flat tensors as it has subtrees."""
        return [table.flat for table in self._tables[: self._count]]

    def put_behind(self, report: Tensor) -> None:
        """Put the report after the gradients: into the first node, and zeros into the others.

        Args:
            report: [elements], of the dtype of the sums.
        """
        for node in self.nodes[1:]:
            node[node.numel() - report.numel() :].zero_()
        own = self.nodes[0]
        own[own.numel() - report.numel() :].copy_(report)

    def open(self, number: int) -> bool:
        """Begin a micro-batch, and close those before, which may have had no gradient here.

        Returns:
            Whether `leaf` holds something to which its gradients are to be added. Else they overwrite it.
        """
        self.close()
        for before in range(self._next, number):
            if not self._begin(before):
                self.leaf.flat.fill_(-0.0)
            self.close()
        return self._begin(number)

    def _begin(self, number: int) -> bool:
        node = Node(number, 1)
        joins = self._stack.would_join(node)
        self.leaf = self._tables[len(self._stack.nodes) - joins]
        # Last, so that nothing is open after an error before.
        self._open, self._next, self._joins = node, number + 1, joins
        return joins

    def close(self) -> None:
        """Note that all gradients of the open micro-batch are in `leaf`, and add up what can be added."""
        node, self._open = self._open, None  # first, so that after an error no node comes a second time
        if node is None:
            return
        additions = self._stack.push(node)
        top = len(self._stack.nodes) + additions - 1  # the place of the value on top, before anything is added
        for step in range(additions):
            if step or not self._joins:
                self._tables[top - step - 1].flat.add_(self._tables[top - step].flat)

    def clear(self) -> None:
        """Forget everything."""
        self._stack, self._next, self._open = Stack(self.deal.count), self._first, None
