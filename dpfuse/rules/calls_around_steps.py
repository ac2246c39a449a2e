"""What traces show of calls around steps. Only traces of the doctor have calls.

What came before the first step of an optimizer is not looked at: the calls do not name it there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dpfuse.rules.windows import reaches
from dpfuse.trace_file import CALLS, Call, RankTrace

__all__ = ["HABIT", "Turn", "last_backward", "turns_of"]

HABIT = 8  # turns in a row, that show a habit
FIELDS = ("forwards", "backwards", CALLS)


@dataclass(frozen=True)
class Turn:
    """What came since the step before of one optimizer, up to its next one.

    Args:
        step: the number of its line.
        forwards, backwards, calls: in the order in which they came.
    """

    step: int
    forwards: Sequence[dict[str, Any]]
    backwards: Sequence[dict[str, Any]]
    calls: Sequence[dict[str, Any]]

    @property
    def kinds(self) -> list[str]:
        """What each call does."""
        return [call["what"] for call in self.calls]

    @property
    def last_backward(self) -> int:
        """The place of the last backward among the calls."""
        return last_backward(self.kinds)

    @property
    def is_skipped(self) -> bool:
        """Whether a scaler was to make a step before the last backward: these are two windows."""
        return Call.UNSCALE in self.kinds[: self.last_backward]

    def of(self, model: str) -> list[dict[str, Any]]:
        """Return the backwards that have written gradients of a model."""
        return [one for one in self.backwards if reaches(one, model)]

    def line_of(self, what: Call) -> str:
        """Return the user's line of the last call of this kind."""
        return next(str(call["at"]) for call in reversed(self.calls) if call["what"] == what)


def turns_of(trace: RankTrace, optimizer: int) -> Iterator[Turn]:
    """Yield what came before each step of an optimizer but the first."""
    since: list[dict[str, Any]] = []
    is_known = False
    for number, line in enumerate(trace.steps):
        since.append(line)
        if line["optimizer"] == optimizer:
            if is_known:
                parts = ([one for each in since for one in each.get(name, [])] for name in FIELDS)
                yield Turn(number, *parts)
            is_known, since = True, []


def last_backward(kinds: Sequence[str]) -> int:
    """Return the place of the last backward among calls, 0 if there is none."""
    return max((place for place, kind in enumerate(kinds) if kind == Call.BACKWARD), default=0)
