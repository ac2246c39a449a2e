"""Writes down what the training of one model does: in its record, and as marks of the clock of its group.

It is the one watcher of forwards, backwards and steps that every wrapper has. The rules look only where the record has
what they look at.
"""

from __future__ import annotations

from operator import is_
from threading import get_ident
from time import perf_counter
from weakref import ref

from torch import nn
from torch.optim import Optimizer

from dpfuse.comm.step_clock import BACKWARD, DELIVERED, FORWARD, LOADER, MOST, STEPPED, StepClock
from dpfuse.comm.waiting import Board
from dpfuse.engine.events import Inputs, Watcher
from dpfuse.loop.loop_check import LoopCheck
from dpfuse.loop.stepping_optimizer import RATE
from dpfuse.loop.training_record import TrainingRecord

__all__ = ["Journal"]


class Journal(Watcher):
    """Hears the training of one model.

    Marks are by the host's clock, so also on a GPU: what the host does not wait for takes no time. Each event writes
    its mark in place: a step has four of them, and a method for it would cost four calls.

    Args:
        module: that is wrapped.
        record: of this model.
        board: of the group, where its heartbeat sends the times of steps. It gets a clock, unless it has one: all
            models of a group use one.
        loop: looks whether the loop is right; None where nothing looks.
    """

    def __init__(self, module: nn.Module, record: TrainingRecord, board: Board | None, loop: LoopCheck | None) -> None:
        self._module = module
        self._record = record
        self._board = board or Board()
        self._clock: StepClock | None = None
        if board is not None:
            self._clock = board.clock = board.clock or StepClock(board.waited)
        self._loop = loop

    def forward_begins(self, inputs: Inputs) -> None:
        """As `Watcher.forward_begins`."""
        record, clock = self._record, self._clock
        if clock is not None:
            clock.thread = get_ident()
            clock.marks.append((FORWARD, perf_counter(), self._board.waited, clock.collected))
            if len(clock.marks) > MOST:
                clock.add_up()
        if self._loop is not None and (record.due or record.trains is not self._module.training):
            self._loop.note_forward(inputs)

    def backward_begins(self, *, sync: bool, announced: bool) -> None:
        """As `Watcher.backward_begins`."""
        record, clock, loop = self._record, self._clock, self._loop
        if clock is not None:
            clock.marks.append((BACKWARD, perf_counter(), self._board.waited, clock.collected))
        if loop is not None and (loop.chooses or record.runs or not sync):
            loop.note_backward(sync=sync, announced=announced)
        record.runs, record.announced = True, announced

    def local_backward_ended(self, *, added: bool) -> None:
        """As `Watcher.local_backward_ended`."""
        record, clock = self._record, self._clock
        if clock is not None:
            clock.marks.append((LOADER, perf_counter(), self._board.waited, clock.collected))
        record.runs = False
        if added:
            record.local_backwards += record.announced
            if self._loop is not None:
                self._loop.note_local_backward()

    def delivered(self) -> None:
        """As `Watcher.delivered`."""
        record, clock = self._record, self._clock
        if clock is not None:
            now = perf_counter()
            clock.marks.append((DELIVERED, now, self._board.waited, clock.collected))
            if now >= clock.due:
                clock.add_up()
        record.runs = False
        record.averages += 1
        loop = self._loop
        if loop is None:
            return
        try:
            for watched in loop.marked:
                watched.mean_ends(record.averages)
            if record.looks or record.averages == loop.next_change:
                loop.note_average()
        except Exception as error:
            loop.fail(error)

    def before_step(self, optimizer: Optimizer) -> None:
        """As `Watcher.before_step`. Most steps have nothing that a rule looks at, which is seen here without a call.

        That touches no tensor, so it is right also while a CUDA graph captures.
        """
        record, loop = self._record, self._loop
        if loop is None:
            return
        quiet = loop.settled and not (record.runs or record.due or record.heard)
        known = loop.optimizers.get(ref(optimizer)) if quiet else None
        watched = None if known is None or known.local_steps or known.averages == record.averages else known.watched
        if known is None or watched is None or watched.rest or watched.param.grad is None:
            loop.note_step(optimizer)
            return
        rates = [*map(RATE, optimizer.param_groups)]
        if len(rates) != len(known.rates) or not all(map(is_, rates, known.rates)):
            known.note_rates(rates)
        known.averages = watched.averages = record.averages
        known.locals, watched.has_stepped = record.local_backwards, True

    def after_step(self, optimizer: Optimizer) -> None:
        """As `Watcher.after_step`."""
        clock = self._clock
        if clock is not None and not self._record.runs:
            clock.marks.append((STEPPED, perf_counter(), self._board.waited, clock.collected))
            if len(clock.marks) > MOST:  # of other models, whose steps are heard, too
                clock.add_up()
