"""Says what the checks of a loop have found: once for each finding in a process. Knows no gradient."""

from __future__ import annotations

import logging
import traceback

from dpfuse.engine.user_line import warn_at_user
from dpfuse.errors import DPFuseError, LoopWarning

__all__ = [
    "ALONE", "CHANGED_IN_WINDOW", "CUT_WINDOW", "EACH_AVERAGED", "NEVER_STEPPED", "NOTHING_AVERAGED", "OTHER_MODES",
    "OTHER_RATES", "REST", "SAME_BATCHES", "SAME_ORDER", "Findings", "findings",
]  # fmt: skip

REST = "DPF-L01"
NOTHING_AVERAGED = "DPF-L02"
CUT_WINDOW = "DPF-L03"
NEVER_STEPPED = "DPF-L04"
SAME_BATCHES = "DPF-L05"
CHANGED_IN_WINDOW = "DPF-L06"
OTHER_RATES = "DPF-L07"
OTHER_MODES = "DPF-L08"
ALONE = "DPF-L09"
EACH_AVERAGED = "DPF-L10"
SAME_ORDER = "DPF-L11"

log = logging.getLogger("dpfuse.loop")
PAGE = "The page guide/loops.md has a section on {code}."


class Findings:
    """What this process has said of its training loop."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def warn(self, code: str, text: str) -> None:
        """Warn at the user's line, unless this process has said so before.

        Args:
            code: of the finding.
            text: what was seen, what is expected, and the remedy.
        """
        if code not in self._said:
            self._said.add(code)
            warn_at_user(LoopWarning(f"{code}: {text} {PAGE.format(code=code)}", code))

    def log(self, code: str, rank: int, text: str) -> None:
        """Write into the log "dpfuse.loop" what may be meant so, unless this process has done so before."""
        if code not in self._said:
            self._said.add(code)
            log.info("%s: %s %s", code, text, PAGE.format(code=code), extra={"rank": rank})

    def log_failure(self, rank: int, error: Exception) -> None:
        """Write into the same log that the check itself has failed, each time: it happens once for each model.

        Args:
            rank: of this process.
            error: that a rule has raised.
        """
        place = traceback.extract_tb(error.__traceback__)[-1]
        log.warning(
            "rank %d: the check of the training loop has failed with %s: %s (at %s:%d). Training goes on; from now on "
            'this rank does not check the loop of this model. Report this, or pass check_loop="off" to the wrapper.',
            rank,
            type(error).__name__,
            " ".join(str(error).split()),
            place.filename.rpartition("/")[2],
            place.lineno,
            extra={"rank": rank},
        )

    def error(self, code: str, text: str) -> DPFuseError:
        """Return the error to raise. It is raised each time, since the step must not happen."""
        error = DPFuseError(f"{code}: {text} {PAGE.format(code=code)}")
        error.code = code
        return error

    def forget(self) -> None:
        """Say everything again: for a process that runs several programs one after the other."""
        self._said.clear()


findings = Findings()  # of this process
