"""The doctor's report for a terminal."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator

from dpfuse.commands.doctor.result import DoctorResult
from dpfuse.commands.doctor.runs import TITLES
from dpfuse.commands.doctor.speed import WORDS

__all__ = ["ANSWERS", "summary"]

LINES, WIDTH = 60, 110
NAMED = 3  # files
ANSWERS = {
    "equal": "yes, bit for bit",
    "close": "yes, within rounding",
    "different": "NO",
    "itself": "cannot be said",
    "void": "cannot be said",
    "unknown": "cannot be said",
}


def summary(report: DoctorResult) -> str:
    """Return the lines. What was found is shown whole, as it ends with what to do, or left to the page."""
    lines, changed, said = [*_measured(report)], [*_changed(report)], [*_said(report)]
    for number, (title, text) in enumerate(said):
        entry = [*_entry(title, text)]
        if number and len(lines) + len(entry) + 1 + len(changed) > LINES:
            lines += _entry("", f"… and {len(said) - number} more, which the page has")
            break
        lines += entry
    return "\n".join([*lines, *changed])


def _said(report: DoctorResult) -> Iterator[tuple[str, str]]:
    wrong = [f"{one.code or one.title}: {one.text}" for one in report.findings]
    for number, text in enumerate(wrong or [report.not_examined or "nothing was found"]):
        yield "" if number else "what is wrong?", text
    for steps in report.skipped:
        if not steps.too_many:
            yield "skipped", steps.explain()
    if report.too_few:
        yield "too few steps", "; ".join(report.too_few)
    for number, one in enumerate(report.remarks):
        yield "" if number else "may be meant so", f"{one.code or one.title}: {one.text}"


def _measured(report: DoctorResult) -> Iterator[str]:
    if report.interrupted:
        yield from _entry("interrupted", f"in {report.interrupted}. This was found before.")
    if report.failure:
        yield from _entry("no comparison", report.failure)
    numbers, speed = report.numbers, report.speed
    if numbers is not None:
        yield from _entry("same numbers?", f"{ANSWERS[numbers.result]}. {numbers.text}")
    if speed.is_busy and speed.verdict:
        yield from _entry("how fast?", speed.verdict)
    elif speed.ratio is not None:
        for wrapper in ("torch", "dpfuse"):
            rates = [f"{1 / one.median:.1f}" for one in speed.timings if one.wrapper == wrapper]
            title = "how fast?" if wrapper == "torch" else ""
            yield from _entry(title, f"{TITLES[wrapper]:<9}: {', '.join(rates)} steps/s")
        yield from _entry("", speed.verdict)
        ours = next(one for one in speed.timings if one.wrapper == "dpfuse")
        total = sum(ours.parts.values())
        large = {part: value for part, value in ours.parts.items() if value > 0.005 * total}
        parts = ", ".join(f"{WORDS[part]} {value / total:.0%}" for part, value in large.items())
        yield from _entry("where it goes", f"{parts}; {ours.waiting / total:.0%} is waiting for a slower rank")
    if speed.link is not None:
        yield from _entry("link", speed.link.explain())
    for advice in speed.advice:
        yield from _entry("", advice.explain())
    if speed.tried:
        yield from _entry("", speed.tried)


def _changed(report: DoctorResult) -> Iterator[str]:
    counts = Counter(path for paths in report.changed.values() for path in paths)
    often = sorted(counts, key=lambda path: (-counts[path], path))  # what each run writes over comes first
    named = [f"{path} ({counts[path]} times)" if counts[path] > 1 else path for path in often[:NAMED]]
    text = f"{len(often)}, such as {', '.join(named)}" if often else "none in the folders that were looked at"
    yield from _entry("files changed", text)


def _entry(title: str, text: str) -> Iterator[str]:
    lines = textwrap.wrap(text, WIDTH - 17)
    for number, line in enumerate(lines):
        yield f"{title if not number else '':<17}{line}"
