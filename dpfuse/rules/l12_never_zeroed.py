"""DPF-L12: each backward adds to gradients that a step has used, and that nothing has changed since then."""

from __future__ import annotations

from dpfuse.rules.calls_around_steps import HABIT, Turn, last_backward, turns_of
from dpfuse.rules.seen import Seen, Traces
from dpfuse.rules.windows import class_of, pairs_of, parts_of
from dpfuse.trace_file import HELD, Call

__all__ = ["find"]


def find(traces: Traces) -> Seen | None:
    """Say that it is so."""
    first = traces[0]
    for optimizer, model in pairs_of(first):
        row: list[Turn] = []
        for turn in turns_of(first, optimizer):
            row = [*row, turn] if _adds_to_old(turn, optimizer, model) else []
            if len(row) == HABIT:
                return Seen(
                    "gradients are never zeroed",
                    f"{class_of(first, optimizer)} made {HABIT} steps in a row, from step {row[0].step} to {turn.step} "
                    f"({turn.line_of(Call.STEP)}), and nothing zeroed its gradients in between. So each "
                    "step used the sum of all batches before it. Expected the gradients of new batches only: call "
                    "optimizer.zero_grad() once for each step. A running sum may be meant so.",
                    row[0].step,
                )
    return None


def _adds_to_old(turn: Turn, optimizer: int, model: str) -> bool:
    """Whether the backwards of a turn add to the gradients of the step before, which nothing has changed."""
    own = turn.of(model)
    held = own[0][HELD][model] if own else []
    kinds = [call["what"] for call in turn.calls if call["what"] == Call.BACKWARD or optimizer in call["of"]]
    is_changed = Call.ZERO in kinds or Call.BY_HAND in kinds[: last_backward(kinds)]
    return any(held) and len(parts_of(own, model)) == 1 and Call.STEP in kinds and not is_changed
