"""How a finding of a check of a training is said: raised, warned of, or written into a log. Knows no check."""

from __future__ import annotations

import logging
import traceback
from typing import Literal

from dpfuse.engine.user_line import warn_at_user
from dpfuse.errors import DPFuseError, LoopWarning, WeightsWarning
from dpfuse.rules.codes import OTHER_TENSORS, REST, WEIGHTS

__all__ = ["Findings", "Level", "findings", "say"]

Level = Literal["raise", "warn", "log"]  # what becomes of a finding, as the user of a wrapper wants it


ERRORS = (REST, WEIGHTS)  # with "raise"; the others leave numbers that a program may mean so
LOOP, WEIGHTS_LOG = logging.getLogger("dpfuse.loop"), logging.getLogger("dpfuse.weights")
PAGE = "See {code} on the page wrong/loops of the documentation."


def say(code: str, text: str, level: Level) -> None:
    """Say what a check has found.

    Args:
        text: begins with the code; what was seen, what is expected, and the remedy.
        level: "raise" raises the worst findings and warns of the others, "warn" warns of all at the user's line, "log"
            writes them into a log.

    Raises:
        DPFuseError: the finding, with its code.
    """
    if level == "raise" and code in ERRORS:
        error = DPFuseError(text)
        error.code = code
        raise error
    of_weights = code in (WEIGHTS, OTHER_TENSORS)
    if level == "log":
        (WEIGHTS_LOG if of_weights else LOOP).warning("%s", text)
    else:
        warn_at_user((WeightsWarning if of_weights else LoopWarning)(text, code))


class Findings:
    """What this process has said of its training loop: each finding once."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._noted: set[str] = set()  # which does not keep them from being said

    def tell(self, code: str, text: str, level: Level) -> None:
        """Say a finding as `say` does, unless this process has said so before. The text is without the code."""
        if code not in self._said:
            self._said.add(code)
            say(code, f"{code}: {text} {PAGE.format(code=code)}", level)

    def note(self, code: str, rank: int, text: str) -> None:
        """Write into the log "dpfuse.loop" what may be meant so, unless this process has done so before."""
        if code not in self._said | self._noted:
            self._noted.add(code)
            LOOP.info("%s: %s %s", code, text, PAGE.format(code=code), extra={"rank": rank})

    def log_failure(self, rank: int, error: Exception) -> None:
        """Write into the same log that a rule of the check has raised, each time: it happens once for each model."""
        place = traceback.extract_tb(error.__traceback__)[-1]
        LOOP.warning(
            "rank %d: the check of the training loop has failed with %s: %s (at %s:%d). Training goes on; from now on "
            'this rank does not check the loop of this model. Report this, or pass check_training="off" to the '
            "wrapper.",
            rank,
            type(error).__name__,
            " ".join(str(error).split()),
            place.filename.rpartition("/")[2],
            place.lineno,
            extra={"rank": rank},
        )

    def forget(self) -> None:
        """Say everything again: for a process that runs several programs one after the other."""
        self._said.clear()
        self._noted.clear()


findings = Findings()  # of this process
