"""DPF-L06: gradients are scaled or cut between two backwards of one window that add to them."""

from __future__ import annotations

from typing import Any

from dpfuse.rules.seen import Seen, Traces, name_list
from dpfuse.trace_file import ABSENT, RESCALED, hashes_in

__all__ = ["find"]

CHANGED = 2  # windows in which gradients are changed


def find(traces: Traces) -> Seen | None:
    """Say that it is so; only steps that are hashed in full show it."""
    for rank, trace in traces.items():
        for model in trace.models:
            rows = [(step, _changes(line, str(model["number"]))) for step, line in enumerate(trace.steps)]
            rows = [(step, changes) for step, changes in rows if changes]
            if len(rows) >= CHANGED:
                step, last = rows[-1]
                places = sorted({place for _, changes in rows for change in changes for place in change})
                names = name_list([model["names"][place] for place in places])
                return Seen(
                    "gradients are changed inside a window",
                    f"in {len(rows)} windows, the gradients of {names} of model {model['number']} ({model['class']}) "
                    f"were scaled or cut between two backwards that add to them, on rank {rank}; before step {step}, "
                    f"{len(last)} of {len(trace.steps[step]['backwards'])} backwards found them so. The first batches "
                    "are then scaled more often than the last. Expected changes such as clipping or unscaling once, "
                    "between the last backward and the step. Move them there, or divide the loss. A running mean may "
                    "be meant so.",
                )
    return None


def _changes(line: dict[str, Any], model: str) -> list[list[int]]:
    """Return, for each backward that adds to gradients that were scaled since the one before, their places."""
    rows = [
        [place for place in one[RESCALED][model] if hashes_in(one["local"][model])[place] != ABSENT]
        for one in line["backwards"]
        if model in one.get(RESCALED, {})
    ]
    return [row for row in rows if row]
