"""The doctor's report as one HTML page, which needs no network, no script and no other file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from dpfuse.commands.doctor.charts import bars, lines
from dpfuse.commands.doctor.findings import Finding
from dpfuse.commands.doctor.result import DoctorResult
from dpfuse.commands.doctor.runs import TITLES
from dpfuse.commands.doctor.same_numbers import curve_of
from dpfuse.commands.doctor.speed import WORDS
from dpfuse.commands.doctor.summary import ANSWERS

__all__ = ["page"]

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --soft: #667; --rule: #d8dce2; --good: #1a7f4b;
  --bad: #b3261e; --c0: #3568c8; --c1: #d9822b; --c2: #2f9e6e; --c3: #8e5bc0; --c4: #d45d79; --c5: #9aa3ad; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7eaee; --paper: #14171b; --soft: #9aa3ad; --rule: #333a42;
  --good: #4cc38a; --bad: #ff7b72; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 46rem; font: 16px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0.5rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; }
pre { white-space: pre-wrap; } code, pre { font-family: ui-monospace, monospace; font-size: 0.9em; }
.good { color: var(--good); } .bad { color: var(--bad); } .soft, figcaption, svg text { color: var(--soft); }
.answers { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: 0.75rem; padding: 0; }
.answers li { list-style: none; border: 1px solid var(--rule); border-radius: 0.5rem; padding: 0.6rem 0.8rem; }
.answers b { display: block; font-size: 1.15rem; }
figure { margin: 1rem 0 0; max-width: 34rem; } svg { width: 100%; height: auto; }
svg text { font-size: 11px; fill: var(--soft); } @media (max-width: 30rem) { svg text { font-size: 13px; } }
.grid { stroke: var(--rule); } .line { fill: none; stroke-width: 1.5; }
.line.c0 { stroke-width: 5; opacity: 0.45; }
.mark { stroke: var(--bad); } svg text.mark { fill: var(--bad); stroke: none; }
.legend { list-style: none; padding: 0; margin: 0.25rem 0; display: flex; flex-wrap: wrap; gap: 0.25rem 1rem;
  font-size: 0.85rem; }
.key { display: inline-block; width: 0.8rem; height: 0.8rem; margin-right: 0.35rem; border-radius: 2px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 0.9rem;
  overflow-wrap: normal; }
th, td { text-align: left; padding: 0.3rem 0.8rem 0.3rem 0; border-bottom: 1px solid var(--rule); }
@media (max-width: 30rem) { th, td { padding-right: 0.35rem; font-size: 0.8rem; } }
.finding { border-left: 3px solid var(--rule); padding-left: 0.8rem; margin: 1rem 0; }
.finding h3 { font-size: 1rem; margin: 0; } .finding p { margin: 0.25rem 0; }
"""
COLOURS = "".join(
    f".line.c{number} {{ stroke: var(--c{number}); }} .bar.c{number} {{ fill: var(--c{number}); }} "
    f".key.c{number} {{ background: var(--c{number}); }}\n"
    for number in range(6)
)
SHOWN = 200  # files of a list


def page(report: DoctorResult) -> str:
    """Return the page as text."""
    parts = [
        _answers(report),
        _numbers(report),
        _speed(report),
        _findings(report),
        _safety(report),
        _contents(report),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>dpfuse doctor</title>\n<style>{STYLE}{COLOURS}</style></head>\n<body>\n<h1>dpfuse doctor</h1>\n"
        f"<p><code>{escape(report.command)}</code></p>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def _answers(report: DoctorResult) -> str:
    numbers, speed = report.numbers, report.speed
    same = ANSWERS[numbers.result] if numbers is not None else "not compared"
    fine = numbers is not None and numbers.fine
    count = len(report.findings)
    wrong = f"{count} finding{'s' * (count != 1)}" if count else "nothing found"
    if report.not_finite is not None:
        wrong = report.not_finite.title + (f", and {count - 1} more" if count > 1 else "")
    elif report.not_examined and not count:
        wrong = "examined in part" if report.interrupted and report.runs else "not examined"
    rows = [
        ("same numbers?", same, "good" if fine else "bad"),
        ("how fast?", speed.short, "soft" if not speed.is_known else "good" if speed.change <= 0.0 else "bad"),
        ("what is wrong?", wrong, "bad" if count or report.not_examined else "good"),
    ]
    items = "".join(f'<li>{escape(title)}<b class="{kind}">{escape(text)}</b></li>' for title, text, kind in rows)
    failure = report.failure
    if report.interrupted:
        failure = f"The doctor was interrupted in {report.interrupted}. This was found before."
    failure = f'<p class="bad"><b>{escape(failure)}</b></p>' if failure else ""
    return f'{failure}<ul class="answers">{items}</ul>'


def _numbers(report: DoctorResult) -> str:
    numbers = report.numbers
    if numbers is None:
        return ""
    parts = [f"<h2>Same numbers?</h2><p>{escape(numbers.text)}</p>"]
    if numbers.difference is not None:
        parts.append(f"<pre>{escape(numbers.difference.explain())}</pre>")
    bad = report.not_finite
    rank = bad.rank if bad is not None and bad.rank is not None else 0
    series = {}
    for run in report.runs:
        if run.wrapper in ("torch", "dpfuse") and run.traces and run.wrapper not in series:
            series[run.wrapper] = curve_of(run.traces[rank], None if bad is None else bad.step)
    parts.append(lines({TITLES[name]: values for name, values in series.items()}, label=f"loss of rank {rank}"))
    return "".join(parts)


def _speed(report: DoctorResult) -> str:
    speed = report.speed
    if not speed.timings:
        why = "Nothing was timed" if report.failure or report.interrupted else "There were too few steps to say"
        return f"<h2>How fast?</h2><p>{why}.</p>"
    parts = ["<h2>How fast?</h2>"]
    if speed.ratio is not None:
        parts.append(f"<p>{escape(speed.verdict[0].upper() + speed.verdict[1:])}.</p>")
    rows = [
        (
            one.run,
            f"{1 / one.median:.2f}",
            *(f"{1e3 * value:.3g}" for value in (_quarter(one.steps, 1), one.median, _quarter(one.steps, 3))),
        )
        for one in speed.timings
    ]
    parts.append(_table(("run", "steps/s", "1st quartile, ms", "median, ms", "3rd quartile, ms"), rows))
    split = {one.run: {WORDS[part]: 1e3 * value for part, value in one.parts.items()} for one in speed.timings}
    parts.append(bars(split, label="where the time of a step goes, mean over steps and ranks", unit="ms"))
    waits = [f"{one.run}: {1e3 * one.waiting:.3g} ms" for one in speed.timings]
    parts.append(f"<p>Waiting for a slower rank when backward begins, mean: {escape('; '.join(waits))}.</p>")
    if speed.link is not None:
        parts.append(f"<p>Link: {escape(speed.link.explain())}.</p>")
    if speed.advice:
        items = "".join(f"<li>{escape(one.explain())}</li>" for one in speed.advice)
        parts.append(f"<p>What would help, each by itself:</p><ul>{items}</ul>")
    if speed.tried:
        parts.append(f"<p>{escape(speed.tried[0].upper() + speed.tried[1:])}.</p>")
    return "".join(parts)


def _findings(report: DoctorResult) -> str:
    parts = ["<h2>What is wrong?</h2>"]
    if report.findings:
        parts += map(_told, report.findings)
    else:
        nothing = report.not_examined or "nothing was found"
        parts.append(f"<p>{escape(nothing[0].upper() + nothing[1:])}.</p>")
    for steps in report.skipped:
        if not steps.too_many:
            text = steps.explain()
            parts.append(f"<p>{escape(text[0].upper() + text[1:])}.</p>")
    if report.too_few:
        parts.append(f"<p>Too few steps for some checks: {escape('; '.join(report.too_few))}.</p>")
    if report.remarks:
        parts += ["<p>This may be meant so:</p>", *map(_told, report.remarks)]
    return "".join(parts)


def _told(finding: Finding) -> str:
    title = escape(f"{finding.code} {finding.title}".strip())
    seen = f'<p class="soft">Seen in {escape("; ".join(finding.where))}.</p>' if finding.where else ""
    return f'<div class="finding"><h3>{title}</h3><p>{escape(finding.text)}</p>{seen}</div>'


def _safety(report: DoctorResult) -> str:
    rows = [
        (
            run.title,
            "ended by the doctor" if run.code is None else str(run.code),
            f"{run.steps}{run.of_optimizers}",
            f"{run.seconds:.1f}",
        )
        for run in report.runs
    ]
    parts = ["<h2>What was run</h2>", _table(("run", "exit code", "steps", "seconds"), rows)]
    parts.append("<h2>Files that changed</h2>")
    changed = {title: paths for title, paths in report.changed.items() if paths}
    for title, paths in changed.items():
        more = f"<li>… and {len(paths) - SHOWN} more</li>" if len(paths) > SHOWN else ""
        items = "".join(f"<li><code>{escape(path)}</code></li>" for path in paths[:SHOWN])
        parts.append(f"<p>{escape(title)}</p><ul>{items}{more}</ul>")
    if not changed:
        parts.append("<p>None in the folders that were looked at.</p>")
    return "".join(parts)


def _contents(report: DoctorResult) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in report.machine["versions"].items() if value)
    machine = report.machine["machine"]
    where = f"{machine['cpu']}, {machine['cores']} cores" + (f", {machine['gpu']}" if machine["gpu"] else "")
    holds = (
        "It holds the command line, losses, times, names of parameters and of files, and the texts of warnings and "
        "errors. Apart from these texts it holds no data, no weights and no values of environment variables."
    )
    return f'<h2>About this page</h2><p class="soft">{escape(where)}; {escape(facts)}. {holds}</p>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    title = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{title}</tr>{body}</table></div>'


def _quarter(values: Sequence[float], number: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * number // 4)]
