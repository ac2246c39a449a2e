"""Uneven inputs: a rank that has none left shadows the collectives of the others. Knows no order of buckets."""

from __future__ import annotations

import weakref
from enum import IntFlag
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join, JoinHook

from dpfuse.comm import collective
from dpfuse.comm.waiting import board_of, finish
from dpfuse.errors import DPFuseError

if TYPE_CHECKING:
    from dpfuse.model.module_sync import ModuleSync

__all__ = ["Turn", "UnevenInputs", "UnevenInputsHook"]


class Turn(IntFlag):
    """What a rank does in an iteration. A rank without input sends 0."""

    ACTIVE = 1  # it runs a forward
    SYNC = 2  # whose backward is synchronised
    BUFFERS = 4  # and before which buffers are sent
    BUFFERS_AFTER = 8  # which are sent in that backward


class UnevenInputs(Join):
    """torch's `Join` of one wrapped module. It costs the module nothing after it has ended, also by an error."""

    def __exit__(
        self,
        type: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shadow the ranks that still have inputs, until none has."""
        (hook,) = self._join_hooks
        assert isinstance(hook, UnevenInputsHook)
        try:
            if type is None:
                hook.expect_no_backward()
            super().__exit__(type, value, traceback)
        finally:
            hook.end()


class UnevenInputsHook(JoinHook):
    """One module's part in a `Join`, on ranks that have inputs and on ranks that have none.

    In every iteration each rank tells the others its turn, in one small all-gather. So all know which ranks are
    active, and take buffers, the order of the buckets and, in the end, the model from the highest of them.

    Args:
        divide_by_initial_world_size: False divides by the number of active ranks.
    """

    def __init__(self, model: Any, sync: ModuleSync, *, divide_by_initial_world_size: bool) -> None:
        # A join that an exception ended leaves its hook with `sync`, which is kept as long as the model.
        self._model: Any = weakref.proxy(model)
        self._sync, self._grads = sync, sync.grads
        self._divide_by_active = not divide_by_initial_world_size
        self._synchronises = False  # whether the last turn of this rank was one whose backward is synchronised
        self._shadowed = False  # whether other ranks shadow that backward
        self._completed = 0  # synchronised backwards before it
        self._kept: list[tuple[Tensor, Tensor | None]] = []  # gradients from the time when this rank had inputs
        self.end()
        sync.before_collectives = self.before_forward

    def before_forward(self) -> None:
        """Tell ranks without input what to shadow; before any other collective of a forward with gradients enabled.

        Raises:
            RuntimeError: some rank has no input, and that is to end the training loop on all ranks.
            DPFuseError: the forward before has not been averaged; some ranks are inside `no_sync()`, others not.
        """
        if not self._model._join_config.enable:
            return
        if self._synchronises and self._sync.window.excused:
            return  # a forward of this turn has raised, and what runs in its place belongs to the same turn
        reducer = self._grads.reducer
        self.expect_no_backward()
        work = Join.notify_join_context(self._model)
        if work is not None:
            finish(work, board_of(self._grads.group), self._model.join_device.type)
        turns = self._exchange(
            Turn.ACTIVE
            | (Turn.SYNC if reducer.require_sync else 0)
            | (Turn.BUFFERS if self._sync.buffers_due else 0)
            | (Turn.BUFFERS_AFTER if self._sync.buffers.beside_gradients else 0)
        )
        self._synchronises, self._completed = reducer.require_sync, reducer.completed
        self._shadowed = reducer.require_sync and 0 in turns

    def expect_no_backward(self) -> None:
        """Make sure that no rank waits for the backward of a forward of this one, and that none has ended its join.

        Raises:
            DPFuseError: some did; these raise an error too.
        """
        reducer, window, rank = self._grads.reducer, self._sync.window, self._grads.group.rank()
        if not self._shadowed:
            return
        if window.owes_backward or window.excused:
            window.request(True)  # whatever the forward asks for that is about to begin
            try:
                reducer.open(announced=True)
            finally:
                reducer.abandon(opened=False)
            reducer.drain()
            raise DPFuseError(
                f"rank {rank} ran a forward inside join() without reducing its gradients afterwards, while ranks that "
                "have no input left shadow one backward of each forward; expected forward and backward in turn. Run "
                "a forward that gets no backward of its own under torch.no_grad() or inside no_sync()."
            )
        if reducer.completed == self._completed:
            raise DPFuseError(
                f"rank {rank}: the last backward inside join() failed, so the ranks that have no input left have "
                "raised an error, too, and shadow no further one; expected all to go well once a rank has no input "
                "left. Leave join() on every rank."
            )

    def main_hook(self) -> None:
        """Shadow one iteration of the ranks that still have inputs.

        `.grad` holds the mean afterwards, for the hook of an optimizer whose shard is on this rank.
        """
        try:
            turn = max(self._exchange(0))
            buffers = self._sync.buffers
            buffers.begin_forward(due=bool(turn & Turn.BUFFERS), local=not turn & Turn.SYNC, is_own=False)
            buffers.before_forward, buffers.beside_gradients = False, bool(turn & Turn.BUFFERS_AFTER)
            self._model.require_forward_param_sync = bool(turn & Turn.SYNC)  # as a forward leaves it
            if turn & Turn.SYNC:
                self._set_gradients_aside()
                self._sync.shadow_backward()
        except BaseException:
            self.end()
            raise

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the model of a rank that had inputs to the last."""
        self._exchange(Turn.ACTIVE if is_last_joiner else 0)
        self._model._authoritative_rank = self._grads.source
        self._sync.send_model(buffers=self._model.forward_sync_buffers)
        self.end()

    def end(self) -> None:
        """Leave model and gradients to a life with even inputs."""
        for param, grad in self._kept:
            param.grad = grad
        self._kept = []
        self._model._join_config = self._model._join_config._replace(enable=False)
        self._sync.before_collectives = None
        self._sync.window.begin()
        self._grads.source = 0
        self._grads.average_over(self._grads.group.size())

    def _exchange(self, turn: int) -> list[int]:
        """The turns of all ranks, by rank."""
        group = self._grads.group
        row = torch.tensor([turn], dtype=torch.int32, device=collective.group_device(group))
        turns = [int(other.item()) for other in collective.all_gather(row, group)]
        active = [rank for rank, other in enumerate(turns) if other]
        source = active[-1]
        for rank in active:
            if turns[rank] != turns[source]:
                raise DPFuseError(
                    f"rank {rank} {_described(turns[rank])}, rank {source} {_described(turns[source])}; expected all "
                    "ranks with inputs to do the same in an iteration inside join(). Enter no_sync() on all of them, "
                    "or on none."
                )
        self._grads.source = source
        if self._divide_by_active:
            self._grads.average_over(len(active))
        return turns

    def _set_gradients_aside(self) -> None:
        params = [param for bucket in self._grads.reducer.buckets for param in bucket.params]
        self._grads.reducer.accumulation.release()
        if not self._kept:
            # Copies, for a gradient may be a view of a buffer that is about to be used.
            with torch.no_grad():
                self._kept = [(param, None if param.grad is None else param.grad.clone()) for param in params]
        for param in params:
            param.grad = None


def _described(turn: int) -> str:
    sync = "synchronises its backward" if turn & Turn.SYNC else "is inside no_sync()"
    return f"{sync} and sends {'' if turn & Turn.BUFFERS else 'no '}buffers"
