"""DPF-L15: a learning rate schedule is stepped after each of several backwards before one step."""

from __future__ import annotations

from dpfuse.rules.calls_around_steps import HABIT, Turn, turns_of
from dpfuse.rules.seen import Seen, Traces
from dpfuse.rules.windows import class_of
from dpfuse.trace_file import Call

__all__ = ["find"]


def find(traces: Traces) -> Seen | None:
    """Say that it is so."""
    first = traces[0]
    if len(first.optimizers) > 1:  # a schedule may count the steps of another one
        return None
    row: list[Turn] = []
    is_stepped = True  # since the backward before, of which nothing is known in front of the first turn
    for turn in turns_of(first, 0):
        count, each, line = 0, True, ""
        for call in turn.calls:
            if call["what"] == Call.BACKWARD:
                count, each, is_stepped = count + 1, each and is_stepped, False
            elif call["what"] == Call.SCHEDULE and 0 in call["of"]:
                is_stepped, line = True, call["at"]
        row = [*row, turn] if count > 1 and each and not turn.is_skipped else []
        if len(row) == HABIT:
            return Seen(
                "a schedule is stepped after each batch",
                f"in each of the steps {row[0].step} to {turn.step} of {class_of(first, 0)}, a schedule was stepped "
                f"({line}) after each of {count} backwards. So it makes {count} steps for each step of the "
                "optimizer, and ends early. Expected one step of both: call scheduler.step() directly after "
                "optimizer.step(). A schedule that counts batches may be meant so.",
                row[0].step,
            )
    return None
