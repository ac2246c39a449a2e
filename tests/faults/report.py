"""The faults as measurements of a record, and the table that a record gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.goals import Entry
from bench.machine import ROOT
from tests.faults.fault import Fault, Outcome, Verdict, shortfalls
from tests.faults.faults import FAULTS
from tests.faults.job import DDP
from tests.faults.jobs import JOB_FAULTS, JobFault

__all__ = ["ALL", "OURS", "entry", "into_page", "newest_record", "table"]

OURS = "dpfuse"
ALL: Sequence[Fault | JobFault] = [*FAULTS, *JOB_FAULTS]
BEGIN, END = "<!-- faults -->", "<!-- end of faults -->"
RESULTS = ROOT / "bench" / "results"
SUFFIX = "-faults.json"


def entry(fault: Fault | JobFault, face: str, verdict: Verdict) -> Entry:
    """One measurement of a record."""
    fault = fault.on(face) if isinstance(fault, Fault) else fault
    facts = {
        "done": fault.done,
        "hazard": fault.hazard,
        "outcome": verdict.outcome.value,
        "expected": fault.expected.outcome.value,
        "within": fault.expected.within or None,
        # The right mean is never wrong, where an error would do.
        "as_expected": verdict.outcome is Outcome.RIGHT or not shortfalls(fault.expected, verdict),
    }
    return Entry("faults", fault.name, face, verdict.seconds, verdict.seconds, 0.0, 1, facts)


def newest_record() -> Path | None:
    """The committed record whose table the page has, if there is one."""
    return max(RESULTS.glob(f"*{SUFFIX}"), default=None)


def table(measurements: Iterable[Mapping[str, Any]]) -> str:
    """Fault, outcome, seconds; dpfuse and DDP. In Markdown."""
    rows: dict[str, dict[str, Mapping[str, Any]]] = {}
    for measured in measurements:
        rows.setdefault(measured["case"], {})[measured["variant"]] = measured
    lines = ["| fault | what happens | dpfuse | s | torch | s |", "| --- | --- | --- | --- | --- | --- |"]
    for name, faces in rows.items():
        cells = [f"`{name}`", next(iter(faces.values()))["info"]["done"]]
        for face in (OURS, DDP):
            measured = faces.get(face)
            cells += ["", ""] if measured is None else [measured["info"]["outcome"], f"{measured['median']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", _summary(rows)])


def _summary(rows: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    parts = []
    for face, word in ((OURS, "dpfuse"), (DDP, "torch")):
        measured = [faces[face] for faces in rows.values() if face in faces]
        passed = sum(one["info"]["as_expected"] for one in measured)
        parts.append(f"{word} does what is expected in {passed} of {len(measured)}")
    silent = sum(DDP in faces and faces[DDP]["info"]["outcome"] == "silent corruption" for faces in rows.values())
    return f"{'; '.join(parts)}, and is wrong in silence in {silent}."


def into_page(page: str, text: str) -> str:
    """The page with `text` as its table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"
