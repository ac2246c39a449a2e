"""What traces show of windows: the backwards that come before a step, and which of their gradients it uses.

A window begins with a backward that finds the gradients of a model empty. It ends with the step that uses them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dpfuse.trace_file import AVERAGED, HELD, LEFT, RankTrace

__all__ = [
    "USUAL", "Window", "averages_in", "averages_of", "class_of", "full_name", "is_averaged", "last_of", "pairs_of",
    "parts_of", "reaches", "repeats", "windows_of",
]  # fmt: skip

USUAL = 8  # windows of the same length, which show how long a window is meant to be


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
    return model in backward.get(LEFT, {}) or is_averaged(backward, model)


def is_averaged(backward: dict[str, Any], model: str | None = None) -> bool:
    """Whether a backward was averaged, of this model or of any."""
    return not backward.keys().isdisjoint(AVERAGED) if model is None else model in averages_in(backward)


def averages_in(backward: dict[str, Any]) -> dict[str, str]:
    """Return the hashes of what a backward has averaged, by model."""
    return {model: hashes for name in AVERAGED for model, hashes in backward.get(name, {}).items()}


def averages_of(line: dict[str, Any]) -> dict[str, str]:
    """Return the hashes of the last average of each model in a step; empty if nothing was averaged."""
    return last_of(line, *AVERAGED)


def last_of(line: dict[str, Any], *fields: str) -> dict[str, str]:
    """Return what the last backward of each model in a step has in these fields."""
    found: dict[str, str] = {}
    for backward in line["backwards"]:
        for name in fields:
            found |= backward.get(name, {})
    return found


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
