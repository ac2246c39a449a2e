"""What one rank has seen that may make weights differ: all ranks examine then. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable

from dpfuse.engine.report_layout import Question

__all__ = ["Suspicion"]


class Suspicion:
    """A suspicion, from when a rank has it until the ranks have examined their weights.

    Args:
        answer: called on every rank in the same backward, once a rank has asked.

    Attributes:
        question: asks the other ranks.
        cause: what this rank has seen, in sentences; empty if that is nothing.
        common: whether every rank knows that a rank suspects something.
    """

    def __init__(self, answer: Callable[[], None]) -> None:
        self.question = Question("weights that a rank suspects", answer)
        self.cause = ""
        self.common = False

    def begin(self, cause: str) -> None:
        """Ask, since this rank has seen something."""
        self.question.asks, self.cause = True, cause

    def heard(self) -> None:
        """Note that every rank knows."""
        self.question.asks, self.common = False, True

    def end(self) -> tuple[bool, str]:
        """Forget it, and return whether every rank knew, and what this one has seen."""
        before = self.common, self.cause
        self.cause, self.common = "", False
        return before
