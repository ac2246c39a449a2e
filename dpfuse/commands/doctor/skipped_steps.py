"""How many steps a `GradScaler` has skipped, and whether these are too many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

from dpfuse.commands.doctor.runs import Run

__all__ = ["SkippedSteps", "skipped_of"]

SHARE, LAST = 0.25, 10  # of the steps, and steps at the end: more than the first, or all of these, are too many


@dataclass(frozen=True)
class SkippedSteps:
    """What a scaler has skipped for one optimizer.

    Args:
        optimizer: its class.
        steps: that the scaler was asked for.
        skipped: of these.
        at_end: of these, in a row up to the last.
    """

    optimizer: str
    steps: int
    skipped: int
    at_end: int

    @property
    def too_many(self) -> bool:
        """Whether this is more than the search for a scale explains."""
        return self.skipped > SHARE * self.steps or self.at_end >= LAST

    def explain(self) -> str:
        """Return it as part of a sentence."""
        last = f", and the last {self.at_end} in a row" if self.at_end >= LAST else ""
        return f"the GradScaler skipped {self.skipped} of {self.steps} steps of {self.optimizer}{last}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


def skipped_of(runs: Sequence[Run]) -> tuple[SkippedSteps, ...]:
    """Return what scalers have skipped, of the first rank of the first run that had one; nothing where none did."""
    none: list[dict[str, Any]] = []
    scaled = next((facts["scaled"] for run in runs for facts in run.facts.values() if facts["scaled"]), none)
    found = [(one["optimizer"], one["made"]) for one in scaled]
    return tuple(
        SkippedSteps(name, len(made), made.count(False), len([*takewhile(lambda step: not step, reversed(made))]))
        for name, made in found
        if not all(made)
    )
