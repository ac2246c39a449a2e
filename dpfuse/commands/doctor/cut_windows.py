"""What traces show of windows: how many backwards come before a step, and what becomes of gradients between them.

A window begins with a backward that finds the gradients of a model empty. It ends with the step that uses them. This
file knows no run and no finding, only traces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dpfuse.trace.trace_file import HELD, LEFT, RESCALED, RankTrace

__all__ = [
    "Window", "changed_gradients", "class_of", "full_name", "lost_batches", "name_list", "pairs_of", "parts_of",
    "reaches", "repeats", "unaveraged_step", "windows_of",
]  # fmt: skip

USUAL = 8  # windows of the same length, which show how long a window is meant to be
LOST = 2  # windows of one length, as far from each other as from the beginning: others are left out on purpose
CHANGED = 2  # windows in which gradients are changed
SHOWN = 3  # names of a list


@dataclass(frozen=True)
class Window:
    """The backwards before one step of an optimizer.

    Args:
        step: the number of its line.
        averaged: of each backward, whether it was averaged.
        lost: how many backwards each earlier window had that was zeroed without a step, since the last step.
    """

    step: int
    averaged: tuple[bool, ...]
    lost: tuple[int, ...]


def windows_of(trace: RankTrace, optimizer: int, model: str) -> list[Window]:
    """Return the windows of an optimizer and a model of its parameters, in the order of their steps.

    Args:
        trace: of one rank.
        optimizer: its number.
        model: the number of the model, as a text.
    """
    found: list[Window] = []
    since: list[dict[str, Any]] = []
    for number, line in enumerate(trace.steps):
        since += [one for one in line["backwards"] if reaches(one, model)]
        if line["optimizer"] == optimizer:
            *lost, last = parts_of(since, model) or [[]]
            if last:
                averaged = tuple(model not in one.get(LEFT, {}) for one in last)
                found.append(Window(number, averaged, tuple(map(len, lost))))
            since = []
    return found


def unaveraged_step(traces: Mapping[int, RankTrace]) -> str | None:
    """Say that a step, after fewer backwards than usual, uses the gradients of each rank alone.

    It counts where the weights of the ranks differ from this step on, and still after the next one, which uses averaged
    gradients again. A program may average gradients or weights by itself, or go on with local steps.

    Args:
        traces: of a run, by rank.
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
                return (
                    f"{USUAL} windows in a row of {class_of(first, optimizer)} had {length} backwards each, of "
                    f"which the last one was averaged. Step {found.step} came after {len(found.averaged)}, and none of "
                    "them was averaged. So it used the gradients of each rank alone, and the weights of the ranks "
                    "differ since then. Expected the last batch before each step to be synchronised, also of an "
                    "epoch: set `model.require_backward_grad_sync = last_of_window or last_of_epoch` before a forward."
                )
    return None


def lost_batches(traces: Mapping[int, RankTrace]) -> str | None:
    """Say that windows were zeroed without a step, at equal distances: the rest of each epoch.

    Args:
        traces: of a run, by rank.
    """
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
                    return (
                        f"the last {USUAL} windows of {class_of(first, optimizer)} had {usual} backwards each. "
                        f"{LOST} windows, of {now[0]} each, were zeroed without a step, the last one before step "
                        f"{window.step}, so their batches taught nothing. Expected a step for each window: step at the "
                        "end of an epoch, too, after a synchronised backward, or let an epoch have a whole number of "
                        "windows."
                    )
            before = window.step
            if window.averaged[-1]:
                between += 1
                same = same + 1 if len(window.averaged) == length else 1
                length = len(window.averaged)
    return None


def changed_gradients(traces: Mapping[int, RankTrace]) -> str | None:
    """Say that gradients were scaled or cut between two backwards of one window that add to them.

    Args:
        traces: of a run, by rank; only steps that are hashed in full show it.
    """
    for rank, trace in traces.items():
        for model in trace.models:
            rows = [(step, _changes(line, str(model["number"]))) for step, line in enumerate(trace.steps)]
            rows = [(step, changes) for step, changes in rows if changes]
            if len(rows) >= CHANGED:
                step, last = rows[-1]
                places = sorted({place for _, changes in rows for change in changes for place in change})
                names = name_list([model["names"][place] for place in places])
                return (
                    f"in {len(rows)} windows, the gradients of {names} of model {model['number']} ({model['class']}) "
                    f"were scaled or cut between two backwards that add to them, on rank {rank}; before step {step}, "
                    f"{len(last)} of {len(trace.steps[step]['backwards'])} backwards found them so. The first batches "
                    "are then scaled more often than the last. Expected changes such as clipping or unscaling once, "
                    "between the last backward and the step. Move them there, or divide the loss. A running mean may "
                    "be meant so."
                )
    return None


def _changes(line: dict[str, Any], model: str) -> list[list[int]]:
    """Return, for each backward that adds to gradients that were scaled since the one before, their places."""
    rows = [
        [place for place in one[RESCALED][model] if "-" not in one["local"][model][8 * place : 8 * place + 8]]
        for one in line["backwards"]
        if model in one.get(RESCALED, {})
    ]
    return [row for row in rows if row]


def name_list(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def pairs_of(trace: RankTrace) -> Iterator[tuple[int, str]]:
    """Yield each optimizer and each model of which it has parameters."""
    for optimizer, facts in enumerate(trace.optimizers):
        names = set(facts["names"])
        for model in trace.models:
            number = str(model["number"])
            if any(full_name(number, name) in names for name in model["names"]):
                yield optimizer, number


def full_name(model: str, name: str) -> str:
    """Return the name that a parameter has in an optimizer: with the number of its model, if that is not the first."""
    return name if model == "0" else f"{model}:{name}"


def class_of(trace: RankTrace, optimizer: int) -> str:
    """Return the name of the class of an optimizer."""
    return str(trace.optimizers[optimizer]["class"])


def reaches(backward: dict[str, Any], model: str) -> bool:
    """Whether a backward has written gradients of a model."""
    return any(model in backward.get(name, {}) for name in (LEFT, "averaged", "all_averaged"))


def parts_of(backwards: Sequence[dict[str, Any]], model: str) -> list[list[dict[str, Any]]]:
    """Cut backwards into windows: where one finds the gradients empty that the one before has left.

    Gradients that are added up elsewhere, such as in buckets, are empty after each backward that is not averaged.
    """
    parts: list[list[dict[str, Any]]] = []
    was_empty = False
    for one in backwards:
        if not parts or (not was_empty and not any(one[HELD][model])):
            parts.append([])
        parts[-1].append(one)
        was_empty = not any(one.get(LEFT, {}).get(model, [1]))
    return parts


def repeats(lines: Sequence[dict[str, Any]], model: str) -> bool:
    """Whether some of the backwards in these lines are of the same batch."""
    inputs = {one["inputs"] for line in lines for one in line["forwards"] if str(one["model"]) == model}
    return len(inputs) < sum(reaches(one, model) for line in lines for one in line["backwards"])


def _where_ranks_part(traces: Mapping[int, RankTrace], windows: Sequence[Window]) -> Window | None:
    """Return the window whose step makes the weights of the ranks differ, if the next one leaves them so."""
    for number, (window, after) in enumerate(pairwise(windows)):
        if _equal(traces, window.step) is False:
            is_one_step = number > 0 and after.averaged[-1]
            return window if is_one_step and _equal(traces, after.step) is False else None
    return None


def _equal(traces: Mapping[int, RankTrace], step: int) -> bool | None:
    """Whether the weights are equal on all ranks after a step; None where it is not of the same parameters on all."""
    if len(traces) < 2 or any(step >= len(trace.steps) for trace in traces.values()):
        return None
    lines = [trace.steps[step] for trace in traces.values()]
    names = [trace.optimizers[line["optimizer"]]["names"] for trace, line in zip(traces.values(), lines, strict=True)]
    if any(one != names[0] for one in names):
        return None
    return len({line.get("parameters", line.get("all_parameters")) for line in lines}) == 1
