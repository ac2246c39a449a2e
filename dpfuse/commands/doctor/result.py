"""Everything that the doctor has found, as one object: for the terminal, the page and the JSON."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpfuse.commands.doctor.findings import Finding
from dpfuse.commands.doctor.runs import Run
from dpfuse.commands.doctor.same_numbers import Numbers, losses_of
from dpfuse.commands.doctor.skipped_steps import SkippedSteps, skipped_of
from dpfuse.commands.doctor.speed import Speed
from dpfuse.rules.not_finite import TITLE

__all__ = ["CANNOT_SAY", "FOUND", "DoctorResult"]

FOUND, CANNOT_SAY, INTERRUPTED = 1, 2, 128 + signal.SIGINT  # exit codes


@dataclass(frozen=True)
class DoctorResult:
    """What was found.

    Args:
        command: the command line.
        runs: all of them.
        numbers: None where a run failed, or Ctrl-C came before one of each kind.
        speed: of all runs.
        findings: what is wrong.
        remarks: what may be meant so.
        changed: files that each run has changed, by the title of the run.
        failure: why the runs could not be compared; empty otherwise.
        failed_under: the first wrapper under which the program failed; empty otherwise.
        machine: facts about it, and versions.
        interrupted: the run in which Ctrl-C has ended the doctor; empty otherwise. It is not one of the runs.
        too_few: checks that had too few steps to say anything, and how many they need.
    """

    command: str
    runs: Sequence[Run]
    numbers: Numbers | None
    speed: Speed
    findings: tuple[Finding, ...]
    remarks: tuple[Finding, ...]
    changed: dict[str, list[str]]
    failure: str
    failed_under: str
    machine: dict[str, Any]
    interrupted: str = ""
    too_few: tuple[str, ...] = ()

    @property
    def not_examined(self) -> str:
        """Say in one sentence why errors may be missing from the report; empty if the program was examined."""
        if self.interrupted:
            part = "examined only in part" if self.runs else "not examined"
            return f"{part}, since the doctor was interrupted in {self.interrupted}"
        if not self.failure:
            return ""
        failed = next((run for run in self.runs if run.failed), None)
        if failed is None:
            return "not examined, since there was no comparison"
        last = f", whose last line is {failed.last_line!r}" if failed.last_line else ""
        why = f"run {failed.number} has failed: {failed.reason()}. See {failed.kept_log}{last}"
        if self.runs[-1].failed:
            return f"not examined, since {why}"
        return f"nothing was found in run {self.runs[-1].number}, dpfuse; {why}"

    @property
    def not_finite(self) -> Finding | None:
        """The finding that a step was made on NaN or infinite values; None if there is none."""
        return next((one for one in self.findings if one.title.startswith(TITLE)), None)

    @property
    def skipped(self) -> tuple[SkippedSteps, ...]:
        """What a scaler has skipped."""
        return skipped_of(self.runs)

    @property
    def exit_code(self) -> int:
        """0: nothing is wrong; 1: something is; 2: nothing can be said; 130: Ctrl-C has ended the doctor."""
        if self.interrupted:
            return INTERRUPTED
        if self.failed_under and (self.failed_under != "torch" or self.findings):
            return FOUND
        if self.failure or self.numbers is None or self.numbers.result == "void":
            return CANNOT_SAY
        if self.numbers.result == "unknown":
            return FOUND if self.findings else CANNOT_SAY
        return FOUND if self.findings or not self.numbers.fine else 0

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        numbers = self.numbers
        return {
            "format": "dpfuse doctor 2",
            "command": self.command,
            "exit code": self.exit_code,
            **self.machine,
            "failure": self.failure,
            "not examined": self.not_examined,
            "interrupted": self.interrupted,
            "numbers": None if numbers is None else {
                "result": numbers.result, "text": numbers.text, "steps": numbers.steps,
                "difference": None if numbers.difference is None else numbers.difference.to_json(),
            },
            "speed": self.speed.to_json(),
            "findings": [finding.to_json() for finding in self.findings],
            "remarks": [remark.to_json() for remark in self.remarks],
            "skipped steps": [one.to_json() for one in self.skipped],
            "too few steps": list(self.too_few),
            "changed files": self.changed,
            "runs": [
                {"title": run.title, "exit code": run.code, "seconds": run.seconds, "steps": run.steps,
                 "optimizers": len(run.traces[0].optimizers) if run.traces else 0,
                 "losses": _finite(losses_of(run.traces[0])) if run.traces else []}
                for run in self.runs
            ],
        }  # fmt: skip


def _finite(values: Sequence[float]) -> list[float | None]:
    """Return numbers as JSON has them: None where one is NaN or infinite."""
    return [value if math.isfinite(value) else None for value in values]
