"""The table of the guide, made from a record. Knows no process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["table"]

NAMES = {
    "flag": "DDP, a flag on each rank",
    "all-reduce": "DDP, an all-reduce of the flag in each step",
    "lightning": 'Lightning, `strategy="ddp"`, `OnExceptionCheckpoint`',
    "accelerate": "accelerate, `set_trigger()` and `check_trigger()`",
    "dpfuse": "dpfuse",
}
TEXTS = {
    "same step": "same step",
    "other steps": "different steps",
    "error": "a rank fails",
    "killed": "ranks are killed",
    "hang": "**hang**",
}


def table(record: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table."""
    trials = record["trials"]
    targets = list(dict.fromkeys(trial["to"] for trial in trials))
    heads = [f"SIGTERM to {'the launcher' if to == 'launcher' else f'{to} alone'}" for to in targets]
    lines = [f"| | {' | '.join(heads)} | collectives for it in a step |", "|---|" + "---|" * (len(heads) + 1)]
    for way, found in record["collectives of a step"].items():
        cells = [cell([trial for trial in trials if (trial["way"], trial["to"]) == (way, to)]) for to in targets]
        lines.append(f"| {NAMES[way]} | {' | '.join(cells)} | {found['asking'] - found['base']:g} |")
    return lines


def cell(trials: Sequence[Mapping[str, Any]]) -> str:
    """Return what came of trials of the same kind; how many, where they differ."""
    counted = Counter(text(trial) for trial in trials)
    if len(counted) == 1:
        return next(iter(counted))
    return "; ".join(f"{count} of {len(trials)}: {told}" for told, count in counted.most_common())


def text(trial: Mapping[str, Any]) -> str:
    """Return what came of one trial."""
    parts = [TEXTS[trial["how"]], "saved" if trial["saved"] else "not saved"]
    return ", ".join(parts if trial["code"] is None else [*parts, f"exit {trial['code']}"])
