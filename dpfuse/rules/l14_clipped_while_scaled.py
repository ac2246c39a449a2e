"""DPF-L14: gradients are clipped before a `GradScaler` has unscaled them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpfuse.rules.seen import Seen, Traces
from dpfuse.rules.windows import class_of
from dpfuse.trace_file import CALLS, Call

__all__ = ["CLIPPED", "find"]

CLIPPED = 2  # steps


def find(traces: Traces) -> Seen | None:
    """Say that it is so."""
    first = traces[0]
    steps: dict[int, list[int]] = {}
    for number, line in enumerate(first.steps):
        for optimizer, clip in _scaled_clips(line.get(CALLS, [])).items():
            steps.setdefault(optimizer, []).append(number)
            if len(steps[optimizer]) == CLIPPED:
                return Seen(
                    "gradients are clipped while they are scaled",
                    f"before steps {' and '.join(map(str, steps[optimizer]))}, gradients of "
                    f"{class_of(first, optimizer)} were clipped ({clip['at']}) while a GradScaler had them scaled. So "
                    "the limit was compared with gradients times the scale. Expected unscaled ones: call "
                    "scaler.unscale_(optimizer) directly before clipping. A limit times the scale may be meant so.",
                    steps[optimizer][0],
                )
    return None


def _scaled_clips(calls: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return, by optimizer, a call that clips gradients which are unscaled afterwards."""
    found: dict[int, dict[str, Any]] = {}
    clips: dict[int, dict[str, Any]] = {}  # of gradients that are scaled, since the last backward
    unscaled: set[int] = set()
    is_scaled = False
    for call in calls:
        what = call["what"]
        if what == Call.BACKWARD:
            clips, unscaled = {}, set()
        elif what in (Call.SCALE, Call.GET_SCALE):
            is_scaled = what == Call.SCALE  # the limit may be computed from a scale that was read
        elif what == Call.CLIP and is_scaled:
            clips |= {optimizer: call for optimizer in call["of"] if optimizer not in unscaled}
        elif what == Call.UNSCALE:
            found |= {optimizer: clip for optimizer, clip in clips.items() if optimizer in call["of"]}
            unscaled |= {*call["of"]}
    return found
