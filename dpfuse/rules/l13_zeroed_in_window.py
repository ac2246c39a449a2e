"""DPF-L13: gradients are zeroed between the backwards of one window, so that those before are lost."""

from __future__ import annotations

from typing import Any

from dpfuse.rules.calls_around_steps import Turn, turns_of
from dpfuse.rules.seen import Seen, Traces
from dpfuse.rules.windows import class_of, pairs_of, parts_of, repeats
from dpfuse.trace_file import Call

__all__ = ["ZEROED", "find"]

ZEROED = 4  # turns in a row, in which as many backwards are lost


def find(traces: Traces) -> Seen | None:
    """Say that it is so.

    A program may use such gradients: for a point ahead of the weights, for an attack on the inputs, or it keeps them.
    Such ones have other weights, backwards at other lines, or write gradients before the step.
    """
    first = traces[0]
    if len(first.optimizers) > 1:  # each may zero what the loss of another one has written
        return None
    for optimizer, model in pairs_of(first):
        turns = [*turns_of(first, optimizer)]
        if any(_has_other_weights(turn, model) for turn in turns):
            continue
        row: list[Turn] = []
        before = 0
        for turn in turns:
            zero = _zero_inside(turn, optimizer)
            is_new = not repeats(first.steps[turn.step - 1 : turn.step + 1], model)
            lost = _lost(turn, model) if zero is not None and is_new else 0
            row = [*(row if lost == before else []), turn] if lost else []
            before = lost
            if zero is not None and len(row) == ZEROED:
                return Seen(
                    "gradients are zeroed inside a window",
                    f"in each of the steps {row[0].step} to {turn.step} of {class_of(first, optimizer)}, gradients "
                    f"were zeroed ({zero['at']}) after {lost} of {len(turn.backwards)} backwards. So these batches "
                    "changed no weight. Expected one call of zero_grad() for each step: move it directly after "
                    "optimizer.step(). Gradients that are only looked at may be meant so.",
                    row[0].step,
                )
    return None


def _zero_inside(turn: Turn, optimizer: int) -> dict[str, Any] | None:
    """Return the last call that zeroes all gradients of an optimizer between two backwards of the same line.

    There is none where the step uses other gradients than those of the last backwards.
    """
    kinds, last = turn.kinds, turn.last_backward
    after = [call["what"] for call in turn.calls[last:] if optimizer in call["of"]]
    if turn.is_skipped or Call.STEP in kinds[:last] or Call.BY_HAND in after:
        return None
    found, line = None, ""  # of the backward before
    for place, call in enumerate(turn.calls[: last + 1]):
        if call["what"] == Call.BACKWARD:
            line = call["at"]
        elif call["what"] == Call.ZERO and optimizer in call["whole"] and line:
            following = turn.calls[place + kinds[place:].index(Call.BACKWARD)]
            found = call if following["at"] == line else None
    return found


def _lost(turn: Turn, model: str) -> int:
    """Return how many backwards of a model were zeroed before the step."""
    *lost, _ = parts_of(turn.of(model), model) or [[]]
    return sum(map(len, lost))


def _has_other_weights(turn: Turn, model: str) -> bool:
    """Whether the weights change between the forwards of one step."""
    return len({one["weights"][model] for one in turn.forwards if model in one.get("weights", {})}) > 1
