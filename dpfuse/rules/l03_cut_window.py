"""DPF-L03: a window is shorter than usual, and its step uses what is not averaged, or it has no step at all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from dpfuse.rules.seen import Seen, Traces
from dpfuse.rules.windows import USUAL, Window, class_of, pairs_of, repeats, windows_of

__all__ = ["find_lost_batches", "find_unaveraged_step"]

LOST = 2  # windows of one length, as far from each other as from the beginning: others are left out on purpose


def find_unaveraged_step(traces: Traces) -> Seen | None:
    """Say that a step, after fewer backwards than usual, uses the gradients of each rank alone.

    It counts where the weights of the ranks differ from this step on, and still after the next one, which uses averaged
    gradients again. A program may average gradients or weights by itself, or go on with local steps.
    """
    first = traces[0]
    for optimizer, model in pairs_of(first):
        windows = windows_of(first, optimizer, model)
        found = _where_ranks_part(traces, windows)
        if found is None:
            continue
        length = same = 0
        for window in windows:
            if window.averaged[-1]:
                same = same + 1 if len(window.averaged) == length else 1
                length = len(window.averaged)
            elif same >= USUAL and len(found.averaged) < length and not any(found.averaged):
                return Seen(
                    "a step on gradients that are not averaged",
                    f"{USUAL} windows in a row of {class_of(first, optimizer)} had {length} backwards each, of "
                    f"which the last one was averaged. Step {found.step} came after {len(found.averaged)}, and none of "
                    "them was averaged. So it used the gradients of each rank alone, and the weights of the ranks "
                    "differ since then. Expected the last batch before each step to be synchronised, also of an "
                    "epoch: set `model.require_backward_grad_sync = last_of_window or last_of_epoch` before a forward.",
                )
    return None


def find_lost_batches(traces: Traces) -> Seen | None:
    """Say that windows were zeroed without a step, at equal distances: the rest of each epoch."""
    first = traces[0]
    for optimizer, model in pairs_of(first):
        length = same = between = count = 0  # of averaged windows: the last length, and how many had it
        seen = (0, 0)  # the length of a lost window, and how many averaged ones came before it
        before = 0  # the line of the step before
        for window in windows_of(first, optimizer, model):
            if window.lost:
                usual = length if same >= USUAL else 0
                now = (window.lost[0], between)
                # A program that zeroes twice before a step, or whose batch is trained on, too, means it: these
                # gradients are for another use.
                on_purpose = len(window.lost) > 1 or repeats(first.steps[before : window.step + 1], model)
                if on_purpose or now[0] >= usual or between < USUAL // 2:
                    count = 0
                else:
                    count, seen = count + 1 if count and now == seen else 1, now
                between = 0
                if count == LOST:
                    return Seen(
                        "batches that teach nothing",
                        f"the last {USUAL} windows of {class_of(first, optimizer)} had {usual} backwards each. "
                        f"{LOST} windows, of {now[0]} each, were zeroed without a step, the last one before step "
                        f"{window.step}, so their batches taught nothing. Expected a step for each window: step at the "
                        "end of an epoch, too, after a synchronised backward, or let an epoch have a whole number of "
                        "windows.",
                    )
            before = window.step
            if window.averaged[-1]:
                between += 1
                same = same + 1 if len(window.averaged) == length else 1
                length = len(window.averaged)
    return None


def _where_ranks_part(traces: Traces, windows: Sequence[Window]) -> Window | None:
    """Return the window whose step makes the weights of the ranks differ, if the next one leaves them so."""
    for number, (window, after) in enumerate(pairwise(windows)):
        if _equal(traces, window.step) is False:
            is_one_step = number > 0 and after.averaged[-1]
            return window if is_one_step and _equal(traces, after.step) is False else None
    return None


def _equal(traces: Traces, step: int) -> bool | None:
    """Whether the weights are equal on all ranks after a step; None where it was hashed in two ways."""
    if len(traces) < 2 or any(step >= len(trace.steps) for trace in traces.values()):
        return None
    lines = [trace.steps[step] for trace in traces.values()]
    names = [trace.optimizers[line["optimizer"]]["names"] for trace, line in zip(traces.values(), lines, strict=True)]
    if any(one != names[0] for one in names) or len({"parameters" in line for line in lines}) > 1:
        return None
    return len({line.get("parameters", line.get("all_parameters")) for line in lines}) == 1
