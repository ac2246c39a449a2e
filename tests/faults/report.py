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

__all__ = ["ALL", "OURS", "entry", "groups", "into_page", "newest_record", "table"]

OURS = "dpfuse"
ALL: Sequence[Fault | JobFault] = [*FAULTS, *JOB_FAULTS]
BEGIN, END = "<!-- faults -->", "<!-- end of faults -->"
RESULTS = ROOT / "bench" / "results"
SUFFIX = "-faults.json"
GROUPS = {
    "1a": "models or options that differ between ranks",
    "1b": "ranks that do different things, end or are silent",
    "1c": "modules that change, other ways to call them",
    "1e": "unusual tensors and numbers",
    "1g": "weights that differ after a step",
    "1f": "processes, launcher and checkpoints",
}  # the beginning of a hazard -> what goes wrong


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
    rows = _by_fault(measurements)
    lines = ["| fault | what happens | dpfuse | s | torch | s |", "| --- | --- | --- | --- | --- | --- |"]
    for name, faces in rows.items():
        cells = [f"`{name}`", next(iter(faces.values()))["info"]["done"]]
        for face in (OURS, DDP):
            measured = faces.get(face)
            cells += ["", ""] if measured is None else [measured["info"]["outcome"], f"{measured['median']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", _summary(rows)])


def groups(measurements: Sequence[Mapping[str, Any]]) -> str:
    """For each group of faults: how many there are, and in how many each wrapper does what is expected. In Markdown."""
    lines = ["| what goes wrong | faults | dpfuse as expected | torch as expected | torch wrong in silence |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for begin, title in GROUPS.items():
        infos = {
            face: [
                measured["info"]
                for measured in measurements
                if measured["variant"] == face and measured["info"]["hazard"].startswith(begin)
            ]
            for face in (OURS, DDP)
        }
        expected = [sum(info["as_expected"] for info in infos[face]) for face in (OURS, DDP)]
        silent = sum(info["outcome"] == Outcome.CORRUPT.value for info in infos[DDP])
        count = max(len(infos[OURS]), len(infos[DDP]))
        lines.append(f"| {title} | {count} | {expected[0]} | {expected[1]} | {silent} |")
    return "\n".join([*lines, "", _summary(_by_fault(measurements))])


def _by_fault(measurements: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Mapping[str, Any]]]:
    rows: dict[str, dict[str, Mapping[str, Any]]] = {}
    for measured in measurements:
        rows.setdefault(measured["case"], {})[measured["variant"]] = measured
    return rows


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
