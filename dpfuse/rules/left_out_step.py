"""A rank makes no step of an optimizer where others have made one. It has no code."""

from __future__ import annotations

from collections.abc import Callable

from dpfuse.rules.seen import SHOWN, Seen, Traces, common_steps
from dpfuse.rules.windows import is_averaged

__all__ = ["TITLE", "find"]

TITLE = "a rank leaves out steps"


def find(traces: Traces, behind: Callable[[int], int]) -> Seen | None:
    """Say that it is so.

    Args:
        traces: of a run, by rank.
        behind: returns how many backwards of a rank were averaged since its last step.
    """
    what = _left_out(traces, behind)
    if what is None:
        return None
    return Seen(
        TITLE,
        f"{what}, expected the same on every rank. From there on the weights of the ranks differ. Is the step "
        "inside a condition on the rank?",
    )


def _left_out(traces: Traces, behind: Callable[[int], int]) -> str | None:
    """Return which rank has made no step where others have, in words; None if all made the same."""
    steps = {rank: len(trace.steps) for rank, trace in traces.items()}
    idle = [rank for rank, count in steps.items() if not count]
    if idle:
        return f"rank {idle[0]} makes no step of an optimizer, and others do" if any(steps.values()) else None
    most = max(steps.values())
    for rank, made in steps.items():
        since = behind(rank)  # none under join(), where a rank without inputs averages nothing of its own
        if made < most and since:
            more = f"{since} averaged backward{'s' * (since != 1)} without one"
            return f"rank {rank} made {made} of {most} steps of an optimizer, and then {more}"
    for step in range(common_steps(traces)):
        counts = {rank: sum(map(is_averaged, trace.steps[step]["backwards"])) for rank, trace in traces.items()}
        if len(set(counts.values())) > 1:
            each = " and ".join(f"{count} on rank {rank}" for rank, count in list(counts.items())[:SHOWN])
            return f"step {step} comes after other numbers of averaged backwards: {each}"
    return None
