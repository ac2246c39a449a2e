"""What a rank did since the last synchronised backward. It decides whether the next one synchronises.

The report compares its numbers, so that a rank which left something out is noticed in the backward in which that
matters. Knows no tensor, no rank and no group.
"""

from __future__ import annotations

from functools import partial

from dpfuse.engine.report_layout import Field
from dpfuse.engine.sync_requests import AFTER, NOTHING, TRAIN

__all__ = ["NEVER", "Window"]

NEVER = 0  # the number of no window


class Window:
    """Counts backwards and forwards since the last synchronised backward, and knows which of them are to synchronise.

    The number of synchronised backwards is not counted: they are collectives, so no rank can be ahead.

    Args:
        counts_forwards: False where ranks may differ in which outputs they use.
        counts_backwards: False where ranks have different numbers of them.

    Attributes:
        require_sync: whether backwards of the next forwards are synchronised; `no_sync()` switches it off.
        without_inputs: whether this rank has no inputs, and only takes part for ranks that still have some.
        excused: whether a forward has raised in this window. What the rank runs in its place is not compared.
        died: whether a backward that was not synchronised died in this window.
        began: the window in which the forward that is running began, if it counts.
        of_outputs: whether the running backward went through a watched output.
    """

    def __init__(self, *, counts_forwards: bool = True, counts_backwards: bool = True) -> None:
        self.require_sync = True
        self.without_inputs = False
        self.excused = False
        self.died = False
        self.began = NEVER
        self._reached = True  # whether the outputs that were reached last are of a forward that counts
        self._counts_forwards = counts_forwards
        self._counts_backwards = counts_backwards
        self._number = NEVER
        self._backwards = 0
        self._told = 0  # how many of them the ranks compare
        self._forwards = 0
        self._asked = NOTHING
        self._outputs_watched = True  # those of the last forward that decides
        self._watched = True  # whether the outputs of the last forward are watched
        self.of_outputs = True
        self.begin()

    @property
    def counts(self) -> bool:
        """Whether the forward that began last counts: every rank runs it."""
        return self.began != NEVER

    @property
    def is_open(self) -> bool:
        """Whether a backward since the last synchronised one accumulated gradients."""
        return self._backwards > 0

    def begin(self) -> None:
        """Begin a new window after a synchronised backward, failed or not."""
        self._number += 1
        self._backwards = self._told = self._forwards = 0
        self.died = self.excused = False
        self._asked, self._outputs_watched = NOTHING, True

    def forget_requests(self) -> None:
        """Let only later forwards, or the state of `no_sync()` at that time, decide about the next backward."""
        self._asked = NOTHING

    def forward_begins(self, *, counts: bool) -> None:
        """Note that a forward with gradients begins. In eval mode it does not count: one rank may run it alone."""
        self.began, self._forwards = self._number if counts else NEVER, self._forwards + counts

    def forward_ends(self, *, watched: bool, trains: bool) -> None:
        """Note that the forward succeeded, in training mode or not.

        If its outputs cannot be watched, its backward will not be noticed.
        """
        self._watched = watched
        if not watched and self.began == self._number:
            self._forwards -= 1
        if trains or not self._asked.trains:
            self._outputs_watched = watched
        self._asked = AFTER[self._asked, bool(trains), bool(self.require_sync)]

    def request(self, sync: bool, *, watched: bool = True) -> None:
        """Note what is asked for as by a forward in training mode, wherever that runs."""
        self._outputs_watched = watched
        self._asked = AFTER[self._asked, TRAIN, sync]

    @property
    def owes_backward(self) -> bool:
        """Whether a forward that synchronises still waits for its backward."""
        return bool(self._asked.sync)

    @property
    def owes_local_backward(self) -> bool:
        """Whether a forward that does not synchronise waits for its backward."""
        return self._asked.sync is False and self._forwards > 0

    @property
    def is_to_synchronise(self) -> bool:
        """Whether the next backward does, as far as that is known before it begins."""
        return self.require_sync if self._asked.sync is None else self._asked.sync

    def may_be_announced(self, *, nested: bool) -> bool:
        """Whether an output may still tell what the backward is that runs, and that none has announced so far.

        A backward of a forward inside `no_sync()` is local, and any other one is synchronised outside of it.

        Args:
            nested: whether it runs inside another one.
        """
        return self._outputs_watched and (self._asked.sync is False or (bool(self._asked.sync) and nested))

    def forward_failed(self) -> None:
        """Count the forward no longer that began last, since it has raised."""
        if self.began == self._number:
            self._forwards -= 1
        self.began, self.excused = NEVER, True

    def forget_forwards(self) -> None:
        """Count no forward so far: its backward will not count."""
        self._number += 1
        self._forwards = 0

    def reached(self, window: int) -> None:
        """Note that a backward first reaches outputs of a forward; `window` is the value of `began` in that forward."""
        self.of_outputs = True
        self._reached = window != NEVER
        # A forward no longer counts once its window is over: its outputs may have their backward later, and a
        # training step may run whole backwards inside its forward.
        if window == self._number:
            self._forwards -= 1

    def backward_begins(self, *, announced: bool) -> bool:
        """Note that a backward begins, and decide whether it synchronises; `announced`: a watched output told it."""
        self.of_outputs = announced or not self._watched
        asked, is_of_eval = self._asked, announced and not self._reached
        self._reached = True  # the next one may reach no output
        if asked.by_eval and is_of_eval:
            return True
        # A backward through none of the watched outputs has no forward of its own.
        if asked.sync is None or (not asked.sync and not announced and self._outputs_watched):
            return self.require_sync
        return asked.sync

    def gradients_accumulated(self) -> None:
        """Note that the ending backward has accumulated gradients.

        If it went through no output, it counts as the backward of all forwards so far: where a batch has nothing to
        learn from, the loss is often the sum of all parameters times 0.
        """
        if not self.of_outputs:
            self.forget_forwards()

    def backward_ends(self) -> None:
        """Count a backward that accumulated gradients and was not synchronised."""
        self.gradients_accumulated()
        self._backwards += 1
        self._told += self._counts_backwards

    def backward_dies(self) -> None:
        """Note that an exception ended a local backward, so the gradients of this window are incomplete.

        A program that begins the window again has the right count at its end. One that goes on has not. With weights,
        backwards are not counted, and `died` is compared instead.
        """
        self._backwards = self._told = 0
        self.died = True

    def begin_again(self) -> None:
        """Begin the window again, since what was accumulated in it was dropped."""
        self._backwards = self._told = 0
        self.died = False

    def compare_backwards(self, yes: bool) -> None:
        """Compare the backwards of this window, or do not: weights say how much each rank has."""
        self._told = self._backwards if yes and self._counts_backwards else 0

    def fields(self) -> list[Field]:
        """Return the fields that the report compares."""
        return [
            Field(
                "backwards",
                partial(getattr, self, "_told"),  # in C, as each backward calls it
                lambda number: f"has run {_counted(number + 1, 'backward')} since the last averaged one",
                "Enter no_sync() on all ranks or on none, and for as many batches; where windows are to differ in "
                "length, call set_gradient_weight() for each. Where one rank would skip a batch, its loss can be "
                "multiplied by 0; torch.autograd.grad gives gradients that are not to be averaged.",
                bits=4,
            ),
            Field(
                "forwards",
                partial(getattr, self, "_forwards") if self._counts_forwards else int,
                lambda number: f"has run {_counted(number, 'forward')} without a backward",
                "If the forward was only for a log or an evaluation, run it under torch.no_grad(), or in eval mode. If "
                "a rank dropped a batch after its forward, keep the ranks in step: skip a batch on all ranks or on "
                "none, or run the backward of a loss that is multiplied by 0, such as "
                "`0 * sum(param.sum() for param in model.parameters())`. Where ranks may use different outputs, pass "
                "find_unused_parameters=True.",
            ),
        ]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
