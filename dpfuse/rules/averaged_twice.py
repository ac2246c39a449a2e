"""The program takes the mean over the ranks by hand, of gradients that a backward has averaged. It has no code."""

from __future__ import annotations

from dpfuse.rules.calls_around_steps import turns_of
from dpfuse.rules.seen import Seen, Traces
from dpfuse.rules.windows import class_of, is_averaged, pairs_of
from dpfuse.trace_file import RANKS, Call

__all__ = ["AGAIN", "find"]

AGAIN = 4  # steps in a row, before which gradients are averaged twice


def find(traces: Traces) -> Seen | None:
    """Say that it is so."""
    first = traces[0]
    for optimizer, model in pairs_of(first):
        if first.models[int(model)].get(RANKS) != first.settings["ranks"]:
            continue  # the wrapper averages over some ranks, and the program may do the rest
        row: list[int] = []
        for turn in turns_of(first, optimizer):
            own, last = turn.of(model), turn.last_backward
            kinds = [call["what"] if optimizer in call["of"] else "" for call in turn.calls][last:]
            row = [*row, turn.step] if own and is_averaged(own[-1], model) and Call.MEAN in kinds else []
            if len(row) == AGAIN:
                line = turn.calls[last + kinds.index(Call.MEAN)]["at"]
                return Seen(
                    "gradients are averaged twice",
                    f"before each of the steps {row[0]} to {row[-1]} of {class_of(first, optimizer)}, the program "
                    f"takes the mean or the sum of gradients over all ranks ({line}), and the backward had averaged "
                    "them already. A mean leaves them what they were, and they travel twice. A sum makes them as many "
                    "times too large as there are ranks. Expected one mean: remove that call, and a division beside "
                    "it.",
                    row[0],
                )
    return None
