"""The faults as measurements of a record, and the table that a record gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.goals import Entry
from bench.machine import ROOT
from tests.faults.fault import Fault, Outcome, Verdict, shortfalls
from tests.faults.faults import CHECKED, FAULTS, ORDINARY
from tests.faults.job import DDP
from tests.faults.jobs import JOB_FAULTS, JobFault

__all__ = ["ALL", "OURS", "counts", "entry", "into_page", "newest_record", "summary", "table"]

OURS = "dpfuse"
# With the defaults of dpfuse; only time-outs are shorter, on both sides.
ALL: Sequence[Fault | JobFault] = [*(fault for fault in FAULTS if fault.options is not CHECKED), *JOB_FAULTS]
BEGIN, END = "<!-- faults -->", "<!-- end of faults -->"
RESULTS = ROOT / "bench" / "results"
SUFFIX = "-faults.json"
HANDLED, WARNS, SILENT = "handled", "a warning after wrong steps", "wrong without a word"
HANGS, LATE = "hangs", "an error that comes late or without the cause"
KINDS = {
    **dict.fromkeys((Outcome.RIGHT, Outcome.NAMED), HANDLED),
    Outcome.WARNED: WARNS,
    **dict.fromkeys((Outcome.HANG, Outcome.ORPHANS), HANGS),
    Outcome.CORRUPT: SILENT,
}  # what counts as what; all others are `LATE`


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


def handled(measurements: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Of each fault, by name: what came of it with dpfuse, and the best that came of it with torch's wrapper."""
    rows: dict[str, dict[str, Mapping[str, Any]]] = {}
    for measured in measurements:
        if measured["case"] not in ORDINARY:
            side = OURS if measured["variant"] == OURS else DDP
            sides = rows.setdefault(measured["case"], {})
            sides[side] = min((sides.get(side, measured), measured), key=_rank)
    return rows


def counts(measurements: Iterable[Mapping[str, Any]], side: str) -> Counter[str]:
    """How many faults end in which way."""
    return Counter(_kind(faces[side]) for faces in handled(measurements).values() if side in faces)


def table(measurements: Sequence[Mapping[str, Any]]) -> str:
    """What goes wrong, and what comes of it with DDP and with dpfuse. In Markdown."""
    lines = ["| What goes wrong | DDP | dpfuse |", "| --- | --- | --- |"]
    for faces in handled(measurements).values():
        cells = [next(iter(faces.values()))["info"]["done"]]
        cells += [faces[side]["info"]["outcome"] if side in faces else "" for side in (DDP, OURS)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{side}: {summary(measurements, side)}." for side in (DDP, OURS))])


def summary(measurements: Iterable[Mapping[str, Any]], side: str) -> str:
    """The counts in words, as the README has them."""
    found = counts(measurements, side)
    return ", ".join(f"{found[kind]} {kind}" for kind in (HANDLED, WARNS, SILENT, LATE, HANGS) if found[kind])


def _kind(measured: Mapping[str, Any]) -> str:
    return KINDS.get(Outcome(measured["info"]["outcome"]), LATE)


def _rank(measured: Mapping[str, Any]) -> int:
    return list(Outcome).index(Outcome(measured["info"]["outcome"]))


def into_page(page: str, text: str) -> str:
    """The page with `text` as its table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"
