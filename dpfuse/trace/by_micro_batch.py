"""Reads a run with fixed micro-batches as if one rank had made it: in the order of the micro-batches."""

from __future__ import annotations

from typing import Any

from dpfuse.trace_file import AVERAGED, MICRO_BATCHES, RankTrace

__all__ = ["by_number"]

OF_JOB = ("ranks", "backend")  # settings that may differ between jobs of other sizes


def by_number(run: dict[int, RankTrace]) -> RankTrace | None:
    """Return the run as one of a single rank; None where a model has no fixed number of micro-batches.

    The ranks have ranges of the numbers, in their order. What a rank does in eval mode is that of the first rank only.

    Args:
        run: the traces of all ranks.
    """
    first = run[0]
    if not first.models or not all(MICRO_BATCHES in model for model in first.models):
        return None
    settings = {name: value for name, value in first.settings.items() if name not in OF_JOB}
    count = min(len(trace.steps) for trace in run.values())
    steps = [_joined([run[rank].steps[step] for rank in sorted(run)]) for step in range(count)]
    return RankTrace(settings, first.models, first.optimizers, steps)


def _joined(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the lines of one step of all ranks as one. All ranks have the same averages, after their last backward."""
    forwards = [*lines[0]["forwards"]]
    for line in lines[1:]:
        forwards += [forward for forward in line["forwards"] if forward.get("training", True)]
    backwards = [
        backward if line is lines[-1] else {name: value for name, value in backward.items() if name not in AVERAGED}
        for line in lines
        for backward in line["backwards"]
    ]
    return {**lines[0], "forwards": forwards, "backwards": backwards}
