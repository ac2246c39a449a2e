"""The gradients of a rank's micro-batches are added in a fixed binary tree, each micro-batch at its place."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpfuse.engine.comm_buffer import CommBuffer
from dpfuse.engine.feeds.accumulating import Accumulating
from dpfuse.engine.protocols import PackArguments
from dpfuse.engine.streams import WritingStreams, capturing
from dpfuse.engine.subtrees import Subtrees
from dpfuse.engine.torch_private import Hooks
from dpfuse.errors import DPFuseError
from dpfuse_kernels import flatten

__all__ = ["TreeSums"]


class TreeSums(Accumulating):
    """Puts the gradients of each micro-batch at its place in the tree, where they are added to those of its sibling.

    Where a micro-batch has no gradient of a parameter, the tree has -0.0, which changes no sum.

    Args:
        buffer: of the bucket; gradients come into it only once they are averaged.
        subtrees: of the same bucket.
        hooks: of the bucket's parameters.
        writers: the streams that write its gradients, on CUDA.
        label: for errors and profiles.
    """

    WHY = "where the gradients of fixed micro-batches are added up"
    REMEDY = "Finish the loop over micro_batches() first."
    takes_parts = False  # the rest would be added to the sibling's gradient, in another order

    def __init__(
        self,
        buffer: CommBuffer,
        subtrees: Subtrees,
        hooks: Hooks,
        writers: WritingStreams | None,
        label: str,
    ) -> None:
        super().__init__(buffer, hooks, writers, label)
        self._subtrees = subtrees
        self._number = -1  # whose gradients came last
        self._taken: set[int] = set()  # places of the parameters whose gradients of that micro-batch are in the tree

    def pack(self, grads: list[Tensor | None], arguments: PackArguments) -> None:
        tree, number = self._subtrees, self._subtrees.deal.number
        if number is None or self._subtrees.deal.ended:
            raise DPFuseError(_outside(number))
        if capturing():
            raise DPFuseError(
                f"{self._label} has to add up a micro-batch while a CUDA graph is captured. Each replay would repeat "
                "its number and its seeds; expected no capture. Train with fixed_micro_batches outside of graphs"
            )
        adds = True
        if number != self._number:
            adds, self._number = tree.open(number), number
            self._taken.clear()
        present = [place for place, grad in enumerate(grads) if grad is not None]
        if again := self._taken.intersection(present):
            raise DPFuseError(
                f"the gradient of parameter {self._buffer.names[min(again)]!r} of micro-batch {number} came after its "
                "bucket had been added up; expected as many times in a backward as in the first synchronised one. "
                "Use the parameter equally often in every micro-batch"
            )
        self._taken.update(present)
        if self._buffer.dtype.is_complex:
            grads = [None if grad is None else torch.view_as_real(grad.resolve_conj()) for grad in grads]
        flatten(grads, tree.leaf, accumulate=adds)
        if arguments.report is not None:
            self._buffer.report.copy_(arguments.report)  # the exchange takes it from there
        if not adds and len(present) < len(grads):
            for grad, view in zip(grads, tree.leaf.views, strict=True):
                if grad is None:
                    view.fill_(-0.0)

    def sent(self) -> None:
        self._drop()

    def forget(self) -> int:
        """As that of `Accumulating`, but return 0: the loop over the micro-batches tells of the loss itself."""
        self._subtrees.deal.lost |= self._drop() > 0
        return 0

    def release(self) -> None:
        self.forget()

    def before_step(self, optimizer: Optimizer) -> None:
        """Nothing: the loop over the micro-batches hears of steps itself."""

    def _drop(self) -> int:
        self._subtrees.clear()
        self._number = -1
        return super().forget()


def _outside(number: int | None) -> str:
    what = (
        "outside of the loop over micro_batches()"
        if number is None
        else f"after that of micro-batch {number} had ended"
    )
    return (
        f"a backward has reached parameters {what}, expected one backward for each micro-batch. Run the backward of "
        "each micro-batch once, inside the loop over micro_batches(); add up losses first. For a gradient that is not "
        "to be averaged, call torch.autograd.grad."
    )
