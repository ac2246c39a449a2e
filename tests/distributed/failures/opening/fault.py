"""A failure that is planted, and what a program does then. Knows no model and no process."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.distributed.failures.opening.lines import Line

__all__ = ["DUMMY", "ERRORS", "INTERRUPT", "OUT_OF_MEMORY", "OWN", "POLICIES", "REPEAT", "SKIP", "SKIP_OOM", "Fault"]

# What a program does after an exception.
SKIP = "SKIP"  # takes the next batch
REPEAT = "REPEAT"  # takes the same batch
SKIP_OOM = "SKIP_OOM"  # takes the next batch after a torch.OutOfMemoryError, and ends after any other exception
DUMMY = "DUMMY"  # after a forward that failed: puts a small batch times zero in its place
POLICIES = SKIP, REPEAT, SKIP_OOM, DUMMY

OUT_OF_MEMORY, INTERRUPT = "OutOfMemoryError", "KeyboardInterrupt"
ERRORS: dict[str, type[BaseException]] = {
    "RuntimeError": RuntimeError,
    OUT_OF_MEMORY: torch.OutOfMemoryError,
    INTERRUPT: KeyboardInterrupt,
}

# The places of the program itself: in the forward of the module, in a hook between outputs and loss, in a tensor hook
# and in a post-accumulate hook of a parameter, and in the step of the optimizer.
OWN = "forward", "loss", "hook", "post", "step"


@dataclass(frozen=True)
class Fault:
    """One failure, on one rank or on two.

    Attributes:
        program: its name.
        rank, step: where, from step 1; the first one is recorded, the second has new buckets.
        policy: what each rank does after an exception.
        part: of the step, "averaged" or "local".
        kind: one of `OWN`; "line" for a line of ours in the backward, "around" for one around the forward.
        at: number of the line, from 1; None raises nowhere, and the lines are counted.
        error: name of the class.
        after: steps that follow.
        also: a failure of another rank in the same step.
        line: as it was counted.
    """

    program: str
    rank: int = 0
    step: int = 1
    policy: str = SKIP
    part: str = "averaged"
    kind: str = "line"
    at: int | None = None
    error: str = "RuntimeError"
    after: int = 5
    also: Fault | None = None
    line: Line | None = None

    @property
    def is_before_the_backward(self) -> bool:
        """Whether the peers learn nothing: it strikes before the averaged backward of that step has begun."""
        return self.part == "local" or self.kind in ("forward", "around")

    def of(self, rank: int) -> Fault | None:
        """Return what strikes on this rank."""
        return next((each for each in (self, self.also) if each is not None and each.rank == rank), None)
