"""Which rank has which of a step's micro-batches, and the binary tree in which their gradients are added.

Knows no tensor and no process group.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MicroBatches", "Node", "Stack"]


class Node(NamedTuple):
    """A node of the tree: the sum of `size` micro-batches from `first` on, a power of two, as far as there are any."""

    first: int
    size: int


class Stack:
    """The sums that wait for their siblings while nodes come from left to right, and which additions come next.

    A node of size 2s is the sum of two nodes of size s. Where the right one has no micro-batch, it is the left one. So
    the number of micro-batches alone decides which additions are made, whichever rank makes them.

    Args:
        count: the number of micro-batches.

    Example:
        >>> stack = Stack(6)
        >>> [stack.push(Node(number, 1)) for number in range(6)]
        [0, 1, 0, 2, 0, 2]
        >>> stack.nodes
        [Node(first=0, size=8)]

    Source: the pairwise sum, as a binary counter does it; the order is that of a reduction tree over all leaves.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.nodes: list[Node] = []

    def push(self, node: Node) -> int:
        """Put a node on top. Return how often the value on top is to be added to the one below it, and taken off."""
        nodes, additions = [*self.nodes, self._grown(node)], 0
        while len(nodes) > 1:
            left, right = nodes[-2:]
            if left.size != right.size or left.first % (2 * left.size) or left.first + left.size != right.first:
                break
            nodes[-2:] = [self._grown(Node(left.first, 2 * left.size))]
            additions += 1
        self.nodes = nodes  # last, so that an error before leaves them as they were
        return additions

    def would_join(self, node: Node) -> bool:
        """Whether a node that came now would be added to the one on top."""
        trial = Stack(self._count)
        trial.nodes = self.nodes[-1:]
        return trial.push(node) > 0

    def _grown(self, node: Node) -> Node:
        """The largest node with the same micro-batches: nothing is to the right of the last one."""
        first, size = node
        while first + size >= self._count and first % (2 * size) == 0 and (first or size < self._count):
            size *= 2
        return Node(first, size)


class MicroBatches:
    """The deal of a step's micro-batches: each rank has a range of them, the first ranks one more where it must be.

    Args:
        count: the number of micro-batches in a step, at least that of the ranks.
        ranks: the number of ranks.

    Attributes:
        number: of the micro-batch that runs on this rank; None outside of the loop over them.
        ended: whether its backward has ended.
        lost: whether sums of this step were lost, so that it has no mean.

    Example:
        >>> deal = MicroBatches(8, 3)
        >>> [deal.of(rank) for rank in range(3)]
        [range(0, 3), range(3, 6), range(6, 8)]
        >>> deal.subtrees(1)
        [Node(first=3, size=1), Node(first=4, size=2)]
        >>> deal.most_nodes(1)
        2
    """

    def __init__(self, count: int, ranks: int) -> None:
        self.count = count
        self.ranks = ranks
        self.number: int | None = None
        self.ended = False
        self.lost = False

    def of(self, rank: int) -> range:
        """The micro-batches of a rank."""
        least, more = divmod(self.count, self.ranks)
        first = rank * least + min(rank, more)
        return range(first, first + least + (rank < more))

    def subtrees(self, rank: int) -> list[Node]:
        """What a rank has added up at the end of its range: the largest nodes of the tree that lie in the range."""
        stack = Stack(self.count)
        for number in self.of(rank):
            stack.push(Node(number, 1))
        return stack.nodes

    def most_nodes(self, rank: int) -> int:
        """The largest number of nodes that a rank holds at a time; up to 48 micro-batches at most log2, rounded up."""
        stack, most = Stack(self.count), 1
        for number in self.of(rank):
            joins = stack.would_join(Node(number, 1))  # a gradient is added to its sibling, without a node of its own
            most = max(most, len(stack.nodes) + (not joins))
            stack.push(Node(number, 1))
        return most
